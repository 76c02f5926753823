"""MACHINE programs written by hand give the right numbers in every order of the warps."""

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
    SUM,
    WARPS,
    WIDTH,
    here,
    pipeline,
    run,
    sums_of,
    tiles_of,
)

from flashgen.interp import warps
from flashgen.interp.common import round_to
from flashgen.ir.dtype import BF16
from flashgen.ir.expr import Const, I, J, exp2, load
from flashgen.ir.nodes import Note, Tile
from flashgen.machine.base import (
    AddFragment,
    Barrier,
    LoadFragment,
    LoadRows,
    MapFragment,
    PackFragment,
    StoreFragment,
    StoreTile,
    ZeroWindow,
)
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
    CopyTileElements,
    CopyVectorAsync,
    MmaSync,
)
from flashgen.plan.arch import TOY


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("seqlen", [ROWS, 1, 50])
def test_the_good_program(seed, seqlen):
    out = run(GOOD, seed=seed, seqlen=seqlen, heads=2)
    np.testing.assert_allclose(out["sums"], sums_of(out["x"]), rtol=1e-4, atol=1e-4)


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
