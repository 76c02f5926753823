"""The IR makes the kernel: two independent statements swapped in a pass change the CUDA, and no template knows."""

import pytest

from flashgen import build, lower
from flashgen.ir.nodes import Copy, For, Gemm, Map, RowReduce, Window, name_of
from flashgen.lower.reorder import OrderError, swap
from flashgen.machine.base import Barrier, StoreFragment, StoreTile
from flashgen.machine.sm80 import CopyTileAsync, WaitGroup
from flashgen.machine.sm80_hazards import hazards
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

SPEC, ARCH = Spec(64, 64), parse_arch("sm_80")
FORWARD, BACKWARD = build.forward(SPEC, ARCH)[0], build.backward(SPEC, ARCH)[1]


def writes(buffer, kind=object):
    """The predicate of the statements of a kind that write a buffer."""
    return lambda stmt: isinstance(stmt, kind) and buffer in {name_of(place) for place in stmt.writes()}


def swapping(first, second):
    """The pass that exchanges two statements."""

    def swapped(kernel, plan):
        return swap(kernel, first, second)

    return swapped


def generated(monkeypatch, table, extra, stages=BACKWARD):
    """Machine kernel and CUDA with one pass more, at the end of the TILE passes or of the family's."""
    if table == "tile":
        monkeypatch.setattr(lower, "TILE_PASSES", (*lower.TILE_PASSES, extra))
    else:
        monkeypatch.setitem(lower.FAMILIES, "sm80", (*lower.FAMILIES["sm80"], extra))
    machine = lower.run(stages.tile, stages.plan)
    return machine, build.cuda(machine, stages.plan, SPEC).text


def line_of(text, part):
    (found,) = [at for at, line in enumerate(text.splitlines()) if part in line]
    return found


CASES = {
    "copies of the prologue": ("tile", "k_tile", "v_tile", Copy, "copy_tile_async<KTile", "copy_tile_async<VTile"),
    "stores of the end": ("machine", "dk", "dv", StoreTile, "store_tile<DkTile", "store_tile<DvTile"),
}


@pytest.mark.parametrize("case", CASES)
def test_swapped_copies_change_the_cuda_and_nothing_else(monkeypatch, case):
    table, first, second, kind, one, other = CASES[case]
    machine, text = generated(monkeypatch, table, swapping(writes(first, kind), writes(second, kind)))
    before = BACKWARD.source.text
    assert line_of(before, one) < line_of(before, other)
    assert line_of(text, one) > line_of(text, other)
    assert sorted(text.splitlines()) == sorted(before.splitlines())
    assert hazards(machine, BACKWARD.plan) == []


def test_copies_of_the_loop_change_the_whole_pipeline(monkeypatch):
    """In the forward the copy of V may go first: the prologue and the loop both follow, waits included."""
    extra = swapping(writes("k_tile", Copy), writes("v_tile", Copy))
    machine, text = generated(monkeypatch, "tile", extra, FORWARD)
    copies = [line for line in text.splitlines() if "copy_tile_async<" in line]
    names = [line.strip().split("<")[1].split(",")[0] for line in copies]
    assert names == ["QTile", "VTile", "KTile", "VTile", "KTile"]
    assert text != FORWARD.source.text and hazards(machine, FORWARD.plan) == []


def test_swapping_twice_gives_the_kernel_back():
    first, second = writes("k_tile", Copy), writes("v_tile", Copy)
    once = swap(BACKWARD.tile, first, second)
    assert once != BACKWARD.tile
    assert swap(once, first, second) == swap(once, second, first) == BACKWARD.tile


def test_positions_and_statements_in_between():
    """k, v, fill dk, fill dv: all four are independent, so the ends of the run change places over the others."""
    start = next(at for at, stmt in enumerate(BACKWARD.tile.body) if writes("k_tile")(stmt))
    swapped = swap(BACKWARD.tile, start, start + 3)
    assert swapped.body[start] == BACKWARD.tile.body[start + 3]
    assert swapped.body[start + 3] == BACKWARD.tile.body[start]
    lower.run(swapped, BACKWARD.plan)


def product(acc):
    return writes(acc, Gemm)


@pytest.mark.parametrize(
    ("first", "second", "buffer"),
    [
        (writes("k_tile", Copy), product("s"), "k_tile"),
        (product("s"), writes("row_max", RowReduce), "s"),
        (writes("row_max_old", Map), writes("row_max", RowReduce), "row_max"),  # read, then overwritten
        (writes("row_sum", Map), writes("row_sum", RowReduce), "row_sum"),
        (writes("p_operand", Map), writes("v_tile", Copy), "p"),  # v over p's producer is fine, p before it is not
    ],
)
def test_dependent_statements_are_refused(first, second, buffer):
    with pytest.raises(
        OrderError, match=rf"attention_forward: .* may not change places: {buffer} ties them, `.+` .+ by"
    ):
        swap(FORWARD.tile, first, second)


def test_the_order_of_first_and_second_does_not_matter_for_a_refusal():
    with pytest.raises(OrderError, match="k_tile ties them"):
        swap(FORWARD.tile, product("s"), writes("k_tile", Copy))


def test_a_let_ties_what_names_it():
    loop = FORWARD.tile.body.index(next(stmt for stmt in FORWARD.tile.body if isinstance(stmt, For)))
    with pytest.raises(OrderError, match="q_start ties them"):
        swap(FORWARD.tile, 1, loop)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (writes("dk_tile", StoreFragment), lambda stmt: isinstance(stmt, StoreTile) and stmt.dst.buffer == "dv"),
        (writes("q_tile", CopyTileAsync), lambda stmt: isinstance(stmt, WaitGroup)),
        (writes("s"), lambda stmt: isinstance(stmt, Barrier)),
    ],
)
def test_nothing_passes_a_barrier_or_a_wait(first, second):
    with pytest.raises(OrderError):
        swap(BACKWARD.machine, first, second)


def test_a_store_does_not_pass_the_barrier_before_it():
    store = next(at for at, stmt in enumerate(BACKWARD.machine.body) if isinstance(stmt, StoreTile))
    assert isinstance(BACKWARD.machine.body[store - 1], Barrier)
    with pytest.raises(OrderError, match="nothing passes between `barrier` and `store_tile dk"):
        swap(BACKWARD.machine, store - 1, store)


def is_window_copy(stmt):
    return isinstance(stmt, Copy) and isinstance(stmt.src, Window)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (writes("nowhere"), writes("k_tile")),
        (is_window_copy, product("s")),  # two copies match
        (writes("k_tile"), writes("k_tile")),
        (writes("q_tile"), writes("k_tile")),  # one in the loop, one before it
        (0, 99),
        (3, 3),
    ],
)
def test_statements_that_are_not_found_are_refused(first, second):
    with pytest.raises(OrderError, match="two statements of one body are to be named"):
        swap(FORWARD.tile, first, second)
