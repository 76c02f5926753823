"""MACHINE programs written by hand, for the tests of the machine interpreter.

The program of most tests is s = x x^T, row sums of s, on tiles of 32 x 16 that two warps copy and divide by rows.
"""

import numpy as np

from flashgen.interp import machine
from flashgen.interp.common import round_to
from flashgen.ir.dtype import BF16, F32, I32
from flashgen.ir.expr import Const, Var, ceil_div
from flashgen.ir.nodes import Axis, Buffer, For, If, Kernel, Let, Level, Scalar, Space, Tile, Window
from flashgen.machine.base import (
    Barrier,
    CombineLanes,
    FillFragment,
    ReduceRows,
    StoreRows,
)
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
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
