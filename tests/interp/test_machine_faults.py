"""Each fault planted in a MACHINE program written by hand is reported as what it is.

A race has several symptoms, one for each order in which the warps may come; the patterns name them all.
"""

from dataclasses import replace

import numpy as np
import pytest
from hand_programs import (
    COPY,
    GOOD,
    LANDED,
    PRODUCT,
    ROWS,
    SEEDS,
    STORE,
    WIDTH,
    here,
    make,
    pipeline,
    run,
    sums_of,
)

from flashgen.interp import machine
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.expr import Const, I, J, Var, load
from flashgen.ir.nodes import Fill, For, If, Tile, Window
from flashgen.machine.base import (
    Barrier,
    CombineLanes,
    FillFragment,
    MapFragment,
    PackFragment,
    ReduceRows,
    StoreFragment,
)
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
    CopyTileElements,
    CopyVectorAsync,
    MmaSync,
)

NO_BARRIER = r"read with no barrier since warp \d wrote it|read before anything was written"
OVERWRITTEN, IN_FLIGHT = "overwritten stage: no barrier since", "in flight"
RACE = f"({NO_BARRIER}|{OVERWRITTEN}|{IN_FLIGHT})"


def fails(body, reason, error=Hazard, seeds=SEEDS, **options):
    """The fault is found in every order of the warps."""
    for seed in seeds:
        with pytest.raises(error, match=reason):
            run(body, seed=seed, **options)


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
    fails(body, r"warp 0 waits at `barrier` \(only one comes\); warp 1 has finished", Deadlock)


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
    fails((*GOOD[:5], MmaSync("y_acc", "s", Tile("x_tile"))), "s is float32, not of the type of x_tile")


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
