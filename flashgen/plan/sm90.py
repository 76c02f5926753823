"""The sm90 family's part of the planner: candidates by warpgroups, the register budget of each, and their cost.

A warpgroup owns 64 rows of queries. The register file is shared by setmaxnreg: (producer, consumer) registers a thread
for one, two and three computing warpgroups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashgen.ir.nodes import Copy, Kernel, Window, name_of
from flashgen.ir.visit import statements
from flashgen.plan import smem
from flashgen.plan.arch import Arch
from flashgen.plan.candidates import tile_names
from flashgen.plan.plan import KIB, Candidate, Placement, Verdict

ROLE_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# Addresses, loop counters, row maxima and sums beside the tiles, counted on compiled kernels.
OVERHEAD_REGISTERS = 30
BLOCKS_KV = (64, 80, 96, 112, 128, 144, 160, 176, 192)
# Clocks of a step that no other warpgroup's work covers (fitted on an H200).
STEP_LATENCY = 300


def candidates(kernel: Kernel) -> Iterator[Candidate]:
    """One, two or three computing warpgroups, each with 64 rows of queries, and one that loads."""
    for warpgroups, block_kv in product((1, 2, 3), BLOCKS_KV):
        yield Candidate(
            blocks=(("block_q", 64 * warpgroups), ("block_kv", block_kv)),
            warps=4 * warpgroups + 4,
            stages=(("k_tile", 2), ("v_tile", 2)),
            layouts=tuple((name, (4 * warpgroups, 1)) for name in tile_names(kernel)),
        )


def swizzled(kernel: Kernel) -> set[str]:
    """Shared tiles that are loaded from global memory: by TMA."""
    copies = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Copy)]
    return {name_of(stmt.dst) for stmt in copies if isinstance(stmt.src, Window)}


def allocate(kernel: Kernel, sizes: dict[str, int], stages: dict[str, int]) -> tuple[Placement, ...]:
    """The map of shared memory."""
    return smem.allocate(kernel, sizes, stages, swizzled(kernel))


def registers(sizes: dict[str, int]) -> int:
    """The estimate for a thread that computes: scores, the packed operand that is still read, output, and the rest."""
    return sizes["block_kv"] // 2 + sizes["block_kv"] // 4 + sizes["head_dim_v"] // 2 + OVERHEAD_REGISTERS


def judge(kernel: Kernel, arch: Arch, sizes: dict[str, int], candidate: Candidate) -> Verdict:
    """Reject a candidate with a sentence, or give its cost."""
    sizes = sizes | dict(candidate.blocks)
    warpgroups = candidate.warps // 4 - 1
    needed = max(place.end for place in allocate(kernel, sizes, dict(candidate.stages))) + KIB
    if needed > arch.shared_per_block:
        excess = f"{needed / KIB:.1f} KiB of shared memory exceed the {arch.shared_per_block / KIB:.0f} KiB of a block"
        return Verdict(candidate, rejection=excess)
    taken, limit = registers(sizes), ROLE_REGISTERS[warpgroups][1]
    if taken > min(limit, arch.max_registers):
        return Verdict(candidate, rejection=f"about {taken} registers a thread exceed {limit}: it would spill")
    elements = sizes["block_q"] * sizes["block_kv"]
    matrix = elements * (sizes["head_dim"] + sizes["head_dim_v"]) / arch.matrix_rate
    softmax = elements * (1 / arch.exp_rate + 3 / 128)
    latency = STEP_LATENCY if warpgroups > 1 else 2 * STEP_LATENCY
    clocks = max(matrix, softmax) + min(matrix, softmax) / (1 + warpgroups) + latency
    cost = clocks * 1e6 / (2 * elements * (sizes["head_dim"] + sizes["head_dim_v"]))
    why = (
        f"{needed / KIB:.1f} KiB, {taken} registers; a step takes {matrix:.0f} clocks of matrix work, "
        f"{softmax:.0f} of softmax"
    )
    return Verdict(candidate, cost=cost, why=why)
