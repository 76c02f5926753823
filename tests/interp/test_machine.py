"""MACHINE programs written by hand: right ones give the right numbers, each planted fault is reported as what it is.

A race has several symptoms, one for each order in which the warps may come; the patterns name them all.
The program of most tests is s = x x^T, row sums of s, on tiles of 32 x 16 that two warps copy and divide by rows.
"""

from dataclasses import replace

import numpy as np
import pytest

from flashgen.interp import machine, warps
from flashgen.interp.common import Deadlock, Hazard, round_to
from flashgen.ir.dtype import BF16, F32, I32
from flashgen.ir.expr import Const, I, J, Var, ceil_div, exp2, load
from flashgen.ir.nodes import Axis, Buffer, Fill, For, If, Kernel, Let, Level, Note, Scalar, Space, Tile, Window
from flashgen.machine.base import (
    AddFragment,
    Barrier,
    CombineLanes,
    FillFragment,
    LoadFragment,
    LoadRows,
    MapFragment,
    PackFragment,
    ReduceRows,
    StoreFragment,
    StoreRows,
    StoreTile,
    ZeroWindow,
)
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
    CopyTileElements,
    CopyVectorAsync,
    MmaSync,
    WaitGroup,
)
from flashgen.plan.arch import TOY
from flashgen.plan.plan import Candidate, Placement, Plan

ROWS, WIDTH, WARPS = 32, 16, 2
SEEDS = range(4)


def here(name, block="block"):
    return Window(name, (Const(0), Var("head"), Var(block) * Var("rows")))


COPY = (CopyTileAsync(Tile("x_tile"), here("x")), CommitGroup())
LANDED = (WaitGroup(0), Barrier())
PRODUCT = MmaSync("s", Tile("x_tile"), Tile("x_tile"), transpose_b=True)
SUM = (FillFragment("r", Const(0.0)), ReduceRows("r", "sum", "s"), CombineLanes("r", "sum"))
STORE = (StoreRows(here("sums"), "r"),)
GOOD = (*COPY, *LANDED, PRODUCT, *SUM, *STORE)


def make(body, *, stages=1, layout=(2, 1), offsets=None, warps=WARPS):
    """The kernel and a plan; `offsets` moves shared buffers, to lay them over each other."""
    shape = ("batches", "heads", "seqlen", "width")
    buffers = [Buffer(name, shape, BF16, Space.GLOBAL) for name in ("x", "y")]
    buffers += [Buffer(name, shape[:3], F32, Space.GLOBAL) for name in ("v", "sums")]
    buffers.append(Buffer("work", ("batches", "heads", "padded", "rows"), F32, Space.GLOBAL, layout_of="s"))
    buffers += [Buffer(name, ("rows", "width"), BF16, Space.SHARED, stages) for name in ("x_tile", "y_tile")]
    buffers += [Buffer("s_tile", ("rows", "rows"), BF16, Space.SHARED), Buffer("v_tile", ("rows",), F32, Space.SHARED)]
    layouts = {"s": layout, "s_out": layout, "y_acc": layout, "y_out": layout}
    shapes = {"s": ("rows", "rows"), "s_out": ("rows", "rows"), "y_acc": ("rows", "width"), "y_out": ("rows", "width")}
    for name, warp_layout in layouts.items():
        dtype = BF16 if name.endswith("out") else F32
        buffers.append(Buffer(name, shapes[name], dtype, Space.REGISTER, warps=warp_layout))
    buffers += [Buffer(name, ("rows",), F32, Space.REGISTER, warps=(layout[0], 1)) for name in ("r", "t")]
    axes = (Axis("block", ceil_div(Var("seqlen"), Var("rows"))), Axis("head", Var("heads")))
    scalars = (Scalar("seqlen", I32), Scalar("heads", I32))
    kernel = Kernel("by_hand", Level.MACHINE, scalars, axes, tuple(buffers), tuple(body))
    return kernel, make_plan(stages, tuple(layouts.items()), offsets or {}, warps)


def make_plan(stages, layouts, offsets, warps):
    sizes = (("x_tile", ROWS * 48, 48, stages), ("y_tile", ROWS * 48, 48, stages), ("s_tile", ROWS * 80, 80, 1))
    placed, end = [], 0
    for name, stage_bytes, row_bytes, count in (*sizes, ("v_tile", ROWS * 4, 4, 1)):
        offset = offsets.get(name, end)
        placed.append(Placement(name, offset, stage_bytes, count, row_bytes))
        end = max(end, placed[-1].end)
    candidate = Candidate((("rows", ROWS),), warps, (), layouts)
    dims = (("rows", ROWS), ("width", WIDTH))
    return Plan("by_hand", TOY, dims, candidate, tuple(placed), registers=0, min_blocks=1)


def run(body, *, seed=0, seqlen=ROWS, heads=1, **options):
    kernel, plan = make(body, **options)
    rng = np.random.default_rng(7)
    x = round_to(BF16, rng.standard_normal((1, heads, seqlen, WIDTH)))
    arrays = {"x": x, "v": rng.standard_normal((1, heads, seqlen)).astype(np.float32)}
    arrays["y"] = np.full_like(x, np.nan)
    arrays["sums"] = np.full((1, heads, seqlen), np.nan, np.float32)
    arrays["work"] = np.full((1, heads, -(-seqlen // ROWS) * ROWS, ROWS), np.nan, np.float32)
    arrays["trace"] = machine.run(kernel, plan, arrays, {"seqlen": seqlen, "heads": heads}, seed)
    return arrays


def tiles_of(x):
    """[heads, blocks, ROWS, WIDTH] with zeros past the end."""
    _, heads, seqlen, width = x.shape
    blocks = -(-seqlen // ROWS)
    padded = np.zeros((heads, blocks * ROWS, width), np.float32)
    padded[:, :seqlen] = x[0]
    return padded.reshape(heads, blocks, ROWS, width)


def sums_of(x):
    tiles = tiles_of(x)
    sums = (tiles @ tiles.swapaxes(2, 3)).sum(axis=3)
    return sums.reshape(len(tiles), -1)[None, :, : x.shape[2]]


def fails(body, reason, error=Hazard, seeds=SEEDS, **options):
    """The fault is found in every order of the warps."""
    for seed in seeds:
        with pytest.raises(error, match=reason):
            run(body, seed=seed, **options)


# Right programs


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seqlen", [ROWS, 1, 50])
def test_the_good_program(seed, seqlen):
    out = run(GOOD, seed=seed, seqlen=seqlen, heads=2)
    np.testing.assert_allclose(out["sums"], sums_of(out["x"]), rtol=1e-4, atol=1e-4)


def pipeline(stages, pending, *, barrier_after=False, barrier_before=True):
    """Walks over `count` blocks of x, adds the products up, with copies running `stages - 1` steps ahead."""
    step, count = Var("step"), Var("count")
    ahead = stages - 1

    def copy(at):
        moved = Window("x", (Const(0), Var("head"), at * Var("rows")))
        return If(at < count, (CopyTileAsync(Tile("x_tile", at % stages), moved),)), CommitGroup()

    stage = Tile("x_tile", step % stages)
    body = (
        *(() if ahead else copy(step)),
        WaitGroup(pending),
        *((Barrier(note="landed"),) if barrier_before else ()),
        *(copy(step + ahead) if ahead else ()),
        MmaSync("s", stage, stage, transpose_b=True, accumulate=True),
        *((Barrier(note="free"),) if barrier_after else ()),
    )
    prologue = tuple(item for at in range(ahead) for item in copy(Const(at)))
    return (
        Let("count", ceil_div(Var("seqlen"), Var("rows"))),
        FillFragment("s", Const(0.0)),
        *prologue,
        For("step", Const(0), count, body),
        *SUM,
        *STORE,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("stages", "pending"), [(1, 0), (2, 0), (3, 1)])
def test_a_pipeline_of_copies(seed, stages, pending):
    out = run(pipeline(stages, pending, barrier_after=stages == 1), seed=seed, seqlen=4 * ROWS, stages=stages)
    tiles = tiles_of(out["x"])
    total = (tiles @ tiles.swapaxes(2, 3)).sum(axis=(1, 3))
    np.testing.assert_allclose(out["sums"][0], np.tile(total, 4), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", [(2, 1), (1, 2)])
def test_two_products_through_shared_memory(seed, layout):
    """y = round(x x^T) x, by way of a shared tile; the copy in elements, the result stored in pieces."""
    y = MmaSync("y_acc", Tile("s_tile"), Tile("x_tile"))
    body = (
        CopyTileElements(Tile("x_tile"), here("x")),
        Barrier(),
        PRODUCT,
        PackFragment("s_out", load("s", I, J) * Const(0.125)),
        StoreFragment(Tile("s_tile"), "s_out"),
        Barrier(),
        y,
        PackFragment("y_out", load("y_acc", I, J)),
        StoreFragment(Tile("y_tile"), "y_out"),
        Barrier(),
        StoreTile(here("y"), Tile("y_tile")),
    )
    out = run(body, seed=seed, seqlen=41, layout=layout)
    tiles = tiles_of(out["x"])
    expected = round_to(BF16, round_to(BF16, tiles @ tiles.swapaxes(2, 3) * 0.125) @ tiles)
    np.testing.assert_allclose(out["y"][0, 0], expected.reshape(-1, WIDTH)[:41], rtol=0.01, atol=0.01)


def test_transposed_and_register_operands_and_vectors():
    v_here = CopyVectorAsync(Tile("v_tile"), here("v"))
    s = load("s", I, J) + load("v_tile", J) * 2.0 - load("t", I) + (I - J)
    body = (
        CopyTileAsync(Tile("x_tile"), here("x")),
        v_here,
        CommitGroup(),
        LoadRows("t", here("v")),
        *LANDED,
        MmaSync("s", Tile("x_tile"), Tile("x_tile"), transpose_b=True),
        MapFragment("s", s),
        PackFragment("s_out", load("s", I, J)),
        MmaSync("y_acc", "s_out", Tile("x_tile")),
        StoreFragment(Tile("s_tile"), "s_out"),
        Barrier(),
        MmaSync("y_acc", Tile("s_tile"), Tile("x_tile"), transpose_a=True, accumulate=True),
        PackFragment("y_out", load("y_acc", I, J)),
        StoreFragment(Tile("y_tile"), "y_out"),
        Barrier(),
        StoreTile(here("y"), Tile("y_tile")),
    )
    out = run(body)
    x, v, i = out["x"][0, 0], out["v"][0, 0], np.arange(ROWS)
    scores = round_to(BF16, x @ x.T + 2 * v - v[:, None] + (i[:, None] - i))
    expected = scores @ x + scores.T @ x
    np.testing.assert_allclose(out["y"][0, 0], expected, rtol=0.01, atol=0.05)


def test_an_accumulator_in_fragment_order():
    add = (*COPY, *LANDED, PRODUCT, AddFragment(here("work"), "s"))
    doubled = (LoadFragment("s", here("work")), MapFragment("s", load("s", I, J) * 2.0), *SUM, *STORE)
    out = run((ZeroWindow(here("work")), Barrier(), *add, Barrier(), *doubled), seqlen=40)
    np.testing.assert_allclose(out["sums"], 2 * sums_of(out["x"]), rtol=1e-4, atol=1e-4)
    assert out["trace"].fragment_orders == {"work": ((ROWS, ROWS), (2, 1))}


def test_partial_sums_may_be_scaled_before_lanes_combine():
    scaled = MapFragment("r", load("r", I) * exp2(load("t", I)))
    body = (*COPY, *LANDED, PRODUCT, LoadRows("t", here("v")), *SUM[:2], scaled, *SUM[1:], *STORE, Note())
    out = run(body)
    expected = sums_of(out["x"]) * (np.exp2(out["v"]) + 1)
    np.testing.assert_allclose(out["sums"], expected, rtol=1e-4, atol=1e-3)


def test_seeds_give_different_orders(monkeypatch):
    orders = set()
    for seed in SEEDS:
        order = []
        original = warps.Block._step

        def spy(self, warp, stmt, order=order, original=original):
            order.append(warp.index)
            return original(self, warp, stmt)

        with monkeypatch.context() as patch:
            patch.setattr(warps.Block, "_step", spy)
            run(GOOD, seed=seed)
        orders.add(tuple(order))
    assert len(orders) > 1


# Planted faults

NO_BARRIER = r"read with no barrier since warp \d wrote it|read before anything was written"
OVERWRITTEN, IN_FLIGHT = "overwritten stage: no barrier since", "in flight"
RACE = f"({NO_BARRIER}|{OVERWRITTEN}|{IN_FLIGHT})"


def without(body, *positions):
    return tuple(stmt for at, stmt in enumerate(body) if at not in positions)


def test_missing_wait():
    reason = r"mma_sync s.* x_tile stage 0: read while the copy of x_tile stage 0 .* in flight"
    fails(without(GOOD, 2), reason)


def test_missing_commit():
    fails(without(GOOD, 1), "in flight")


def test_missing_barrier_after_a_copy():
    fails(without(GOOD, 3), rf"mma_sync s.*{RACE}")


@pytest.mark.parametrize("warps", [1, 2])
def test_missing_barrier_after_a_store(warps):
    """One warp alone needs it too: its lanes read each other's values."""
    stores = (PackFragment("s_out", load("s", I, J)), StoreFragment(Tile("s_tile"), "s_out"))
    body = (*GOOD[:5], *stores, MmaSync("y_acc", Tile("s_tile"), Tile("x_tile")))
    fails(body, "s_tile stage 0: read with no barrier since", layout=(warps, 1), warps=warps)


def test_missing_barrier_before_the_next_copy():
    fails(pipeline(1, 0), f"x_tile stage 0: .*{RACE}", seqlen=3 * ROWS)


def test_a_stage_refilled_before_it_is_free():
    """Two stages, but the copy for the next step is issued before the barrier that ends the last one."""
    early = list(pipeline(2, 0))
    loop = early[-5]
    assert isinstance(loop, For)
    wait, barrier, copy, commit, product = loop.body
    early[-5] = replace(loop, body=(wait, copy, commit, barrier, product))
    fails(early, f"({OVERWRITTEN}|{IN_FLIGHT})", seqlen=5 * ROWS, stages=2, seeds=range(8))


@pytest.mark.parametrize(("stages", "pending"), [(1, 1), (2, 1), (3, 2)])
def test_wrong_pending_count(stages, pending):
    fails(pipeline(stages, pending, barrier_after=True), "in flight", seqlen=4 * ROWS, stages=stages)


def test_copy_onto_a_copy_in_flight():
    fails((*COPY, *GOOD), "overwritten while the copy of x_tile stage 0 .* in flight")


def test_two_warps_write_the_same_elements():
    """With rows copied by other warps than those that store to them."""
    store = (FillFragment("y_acc", Const(1.0)), PackFragment("y_out", load("y_acc", I, J)))
    body = (CopyTileElements(Tile("y_tile"), here("x")), *store, StoreFragment(Tile("y_tile"), "y_out"))
    fails(body, r"overwritten with no barrier since warp \d wrote it", layout=(1, 2))


ALIASED = {"y_tile": 0}
OVER = (FillFragment("y_acc", Const(1.0)), PackFragment("y_out", load("y_acc", I, J)))
OVER = (*OVER, StoreFragment(Tile("y_tile"), "y_out"))


def test_aliased_buffer_overwritten_while_it_is_read():
    fails(
        (*GOOD[:5], *OVER),
        rf"y_tile stage 0: {OVERWRITTEN}|x_tile stage 0: read where y_tile stage 0 was written last",
        offsets=ALIASED,
        layout=(1, 2),
    )
    run((*GOOD[:5], Barrier(), *OVER), offsets=ALIASED)
    run((*GOOD[:5], *OVER))


def test_aliased_buffer_read_after_it_was_overwritten():
    body = (*COPY, *LANDED, *OVER, Barrier(), PRODUCT)
    fails(body, "x_tile stage 0: read where y_tile stage 0 was written last", offsets=ALIASED)
    run(body)


def test_aliased_buffer_overwritten_while_it_is_copied():
    reason = r"y_tile .* copy of x_tile stage 0 .* in flight|copy_tile_async x_tile.*no barrier since warp 0 wrote it"
    fails((*COPY, *OVER), reason, offsets=ALIASED)
    partly = {"y_tile": (ROWS - 1) * 48}  # only the last row of x_tile
    fails((*COPY, *OVER), reason, offsets=partly)
    run((*COPY, *OVER))


@pytest.mark.parametrize("op", ["sum", "max"])
def test_missing_combine_lanes(op):
    reduce = (FillFragment("r", Const(0.0)), ReduceRows("r", op, "s"))
    into_tile = MapFragment("s", load("s", I, J) - load("r", I))
    fails((*GOOD[:5], *reduce, *STORE), "store_rows .*partial row result read: .* r were not combined")
    fails((*GOOD[:5], *reduce, into_tile), "map_fragment s.*partial row result read")
    run((*GOOD[:5], *reduce, CombineLanes("r", op), into_tile, *STORE))


def test_a_sum_combined_twice_is_four_times_too_large():
    out = run((*GOOD[:-1], CombineLanes("r", "sum"), *STORE))
    np.testing.assert_allclose(out["sums"], 4 * sums_of(out["x"]), rtol=1e-4, atol=1e-3)


def test_barrier_not_reached_by_all():
    body = (*GOOD[:5], If(Var("warp").equals(0), (Barrier(note="only one comes"),)))
    fails(body, r"warp 0 waits at `barrier ` \(only one comes\); warp 1 has finished", Deadlock)


def test_different_barriers():
    first, second = If(Var("warp").equals(0), (Barrier(note="a"),)), If(Var("warp").equals(1), (Barrier(note="b"),))
    fails((first, second), "meet at different barriers", Deadlock)


def test_row_sums_that_warps_do_not_agree_on():
    """s is divided along its columns, so each warp sums half of a row; CombineLanes does not reach other warps."""
    fails(GOOD, "another warp stored other values", layout=(1, 2))


def test_values_in_other_threads():
    kernel, plan = make((*GOOD[:5], MapFragment("y_acc", load("t", I))))
    other = kernel.with_buffer(replace(kernel.buffer("t"), warps=(1, 1)))
    filled = other.having(body=(FillFragment("t", Const(0.0)), *other.body))
    arrays = {"x": np.zeros((1, 1, ROWS, WIDTH), np.float32)}
    with pytest.raises(Hazard, match=r"t\[i\] \(\(1, 1\)\) is in other threads than y_acc"):
        machine.run(filled, plan, arrays, {"seqlen": ROWS, "heads": 1})
    turned = (*GOOD[:5], MapFragment("s_out", load("s", J, I)))
    fails(turned, r"s\[j, i\] .* is in other threads")


def test_register_operands_must_fit_their_accumulator():
    pack = PackFragment("s_out", load("s", I, J))
    fails((*GOOD[:5], pack, MmaSync("y_acc", "s_out", Tile("x_tile"))), "lies otherwise", layout=(1, 2))
    fails((*GOOD[:5], MmaSync("y_acc", "s", Tile("x_tile"))), "not packed to 16 bits")


def test_unpacked_values_do_not_go_to_shared_memory():
    fails((*GOOD[:5], StoreFragment(Tile("s_tile"), "s")), "it was not packed")


def test_reading_what_was_never_written():
    fails((Barrier(), PRODUCT), "read before anything was written")
    fails(STORE, "r is read before anything was written")
    fails((*COPY, *LANDED, replace(PRODUCT, accumulate=True)), "s is read before anything was written")


def test_indices_out_of_range():
    fails((CopyTileAsync(Tile("x_tile", Const(2)), here("x")),), "the buffer has 2 stages", stages=2)
    loaded = MapFragment("s", load("v_tile", J + 1))
    fails((CopyVectorAsync(Tile("v_tile"), here("v")), CommitGroup(), *LANDED, loaded), "leaves the 32")
    absent = Window("x", (Const(1), Const(0), Const(0)))
    fails((CopyTileAsync(Tile("x_tile"), absent),), "x has no batch 1")


def test_statements_of_another_level_are_refused():
    fails((Fill("s", Const(0.0)),), "Fill is not a statement of sm80", TypeError)


def test_the_trace():
    out = run(GOOD, seqlen=50, heads=3)
    trace, blocks = out["trace"], 2 * 3
    assert trace.blocks == blocks
    assert trace.global_bytes_read == 3 * 50 * WIDTH * 2
    assert trace.global_bytes_written == 3 * 50 * 4
    assert trace.flops == blocks * 2 * ROWS * ROWS * WIDTH
    assert trace.statements["MmaSync"] == blocks * WARPS
    assert trace.clocks["matrix"] == blocks * ROWS * ROWS * WIDTH / TOY.matrix_rate
    reads = WARPS * ROWS * WIDTH + ROWS * WIDTH  # each warp all of b and its rows of a
    assert trace.shared_bytes == blocks * 2 * (ROWS * WIDTH + reads)
    assert trace.clocks_per_block >= trace.clocks["matrix"] / blocks
