"""The candidates for each kernel: a few dozen combinations of block sizes, warps, stages and warp layouts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashgen.ir.nodes import Copy, For, Kernel, Space, name_of
from flashgen.ir.visit import statements
from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate
from flashgen.plan.wide import divides_output, is_wide, output_layouts, shares_values

Layout = tuple[int, int]

# Stages of (q and lse, dout and delta) in the backward.
STAGES = ((1, 1), (2, 1), (2, 2))


def candidates(kernel: Kernel, arch: Arch, sizes: dict[str, int]) -> Iterator[Candidate]:
    """All candidates for a kernel whose loop walks over keys, over queries, or that has no loop."""
    if kernel.name == "attention_backward":
        yield from _backward(kernel, arch, sizes)
    elif kernel.name == "attention_backward_aux":
        yield from _scores_alone(kernel, arch)
    elif divides_output(kernel, sizes):
        yield from _columns_of_output(kernel, arch)
    else:
        yield from _rows_of_queries(kernel, arch)
        if kernel.name == "attention_forward" and is_wide(sizes):  # fewer rows, where Q leaves little room
            yield from _columns_of_output(kernel, arch)


def tile_names(kernel: Kernel) -> list[str]:
    """The register tiles of a kernel."""
    return [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]


def looped_tiles(kernel: Kernel) -> list[str]:
    """The shared tiles and vectors that a kernel's loops copy."""
    loops = tuple(stmt for stmt in kernel.body if isinstance(stmt, For))
    copies = [stmt.dst for stmt in statements(loops) if isinstance(stmt, Copy)]
    return [name_of(place) for place in copies if kernel.space(place) is Space.SHARED]


def _columns(arch: Arch) -> tuple[int, ...]:
    step = 2 * arch.mma[1]
    return tuple(step * count for count in (1, 2, 3, 4, 5, 6, 8))


def _rows_of_queries(kernel: Kernel, arch: Arch) -> Iterator[Candidate]:
    """Each warp owns one or two instruction heights of query rows, and sees every key of the block."""
    m = arch.mma[0]
    tiles = ("k_tile",) if shares_values(kernel) else ("k_tile", "v_tile")
    for warps, height, block_kv, stages in product(arch.warps, (1, 2), _columns(arch), (1, 2)):
        yield Candidate(
            blocks=(("block_q", warps * height * m), ("block_kv", block_kv)),
            warps=warps,
            stages=tuple((name, stages) for name in tiles),
            layouts=tuple((name, (warps, 1)) for name in tile_names(kernel)),
        )


def _scores_alone(kernel: Kernel, arch: Arch) -> Iterator[Candidate]:
    """Each warp owns rows of the scores, whichever these are; all that a step copies is staged alike."""
    rows, cols = kernel.buffer("s").shape
    looped = looped_tiles(kernel)
    for warps, height, columns, stages in product(arch.warps, (1, 2), _columns(arch), (1, 2)):
        blocks = {rows: warps * height * arch.mma[0], cols: columns}
        if rows == cols and blocks[rows] != warps * height * arch.mma[0]:
            continue
        yield Candidate(
            blocks=tuple(blocks.items()),
            warps=warps,
            stages=tuple((name, stages) for name in looped),
            layouts=tuple((name, (warps, 1)) for name in tile_names(kernel)),
        )


def _columns_of_output(kernel: Kernel, arch: Arch) -> Iterator[Candidate]:
    """As many warps as divide the columns of O own the same rows of queries: each computes all scores of these."""
    m = arch.mma[0]
    depths = ((1,), (2,)) if shares_values(kernel) else ((1, 1), (2, 1), (2, 2))
    for warps, across, block_kv, stages in product(arch.warps, (2, 4), _columns(arch), depths):
        if warps % across:
            continue
        yield Candidate(
            blocks=(("block_q", warps // across * m), ("block_kv", block_kv)),
            warps=warps,
            stages=tuple(zip(("k_tile", "v_tile"), stages, strict=False)),
            layouts=output_layouts(tile_names(kernel), warps // across, across),
        )


def _backward(kernel: Kernel, arch: Arch, sizes: dict[str, int]) -> Iterator[Candidate]:
    """Each warp owns rows of keys; where split, two warps share rows and divide the columns."""
    m = arch.mma[0]
    for warps, height, split, block_q, stages in product(arch.warps, (1, 2), (1, 2), _columns(arch), STAGES):
        if warps % split:
            continue
        layout = (warps // split, split)
        layouts = dict.fromkeys(tile_names(kernel), layout)
        if "dq_acc" in layouts:
            layouts["dq_acc"] = balanced(warps, block_q, sizes["head_dim"], arch)
        yield Candidate(
            blocks=(("block_kv", layout[0] * height * m), ("block_q", block_q)),
            warps=warps,
            stages=(
                *((name, stages[0]) for name in ("q_tile", "lse_tile")),
                *((name, stages[1]) for name in ("dout_tile", "delta_tile")),
            ),
            layouts=tuple(layouts.items()),
        )


def balanced(warps: int, rows: int, cols: int, arch: Arch) -> Layout:
    """The division of a product among the warps that reads the fewest operand bytes, or (0, 0) where none fits."""
    m, n, _ = arch.mma
    fitting = [
        (rows // along + cols // (warps // along), along)
        for along in (1, 2, 4, 8)
        if warps % along == 0 and rows % (m * along) == 0 and cols % (2 * n * (warps // along)) == 0
    ]
    if not fitting:
        return 0, 0
    along = min(fitting)[1]
    return along, warps // along
