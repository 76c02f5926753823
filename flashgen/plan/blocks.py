"""The plan of the kernel that counts the visible elements of blocks: one tile for every chip, as it only evaluates."""

from __future__ import annotations

from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate, Plan

WARPS = 4
ROWS = 16  # of a warp: the height of a register tile's smallest part


def plan(kernel: str, arch: Arch, block_size: int) -> Plan:
    """Four warps, each with 16 blocks of keys; block_size: keys of a block."""
    rows = WARPS * ROWS
    layouts = (("shown", (WARPS, 1)),)
    return Plan(
        kernel=kernel,
        arch=arch,
        dims=(("tile_blocks", rows), ("block_size", block_size)),
        candidate=Candidate((("block_size", block_size),), WARPS, (), layouts),
        shared=(),
        registers=rows * block_size // (32 * WARPS) + 40,
        min_blocks=1,
        source="its one shape",
    )
