"""The sm90 family's part of the planner for the kernels of the backward.

`attention_backward`: each computing warpgroup owns 64 rows of keys and walks over blocks of queries. Scores, their
gradient and both accumulators are in its registers; dS goes through shared memory for dQ, whose rows (or, where a block
has 64 queries, whose columns) the warpgroups divide among them.
`attention_backward_dq`: each owns 64 rows of queries and walks over blocks of keys.

Trait of a candidate: "late" (the product of P and dO is issued when dS is done, not before it is computed).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from flashgen.ir.nodes import Buffer, Kernel, Space
from flashgen.plan.arch import Arch
from flashgen.plan.cost import accumulator_registers
from flashgen.plan.plan import KIB, Candidate, Placement, Plan, Verdict
from flashgen.plan.sm90 import BARRIER_BYTES, ROLE_REGISTERS
from flashgen.plan.smem import panel_bytes

KERNELS = ("attention_backward", "attention_backward_dq")
# Both accumulators of a block of keys, of 64 rows each warpgroup, leave no room for a wider head.
MAX_HEAD_DIM = 128
# Where the columns of dQ are divided each warpgroup takes a panel of 64.
HEAD_DIM_UNIT = 64
# Addresses, counters, the vectors of a step, counted on compiled kernels.
OVERHEAD_REGISTERS = 16
BLOCKS = (64, 80, 96, 112, 128)
# Clocks of a step that no other work covers (fitted on an H200).
STEP_LATENCY = 1400
# The time of a step whose product of P and dO is issued early, where "late" takes 1: issuing a product with an operand
# in registers holds its warps up until it runs (an H200 at 4096: 1.02 to 1.12).
EARLY = 1.06
STAGED = {
    "attention_backward": (("q_tile", "lse_tile"), ("dout_tile", "delta_tile")),
    "attention_backward_dq": (("k_tile",), ("v_tile",)),
}
# Where a result leaves: over an input of its size that no warp reads any more.
LEAVES_OVER = {"dk_tile": "k_tile", "dv_tile": "v_tile", "dq_tile": "q_tile"}


def head_dims(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """Head dims padded to whole panels; that of q and k to that of v, since a block of 64 queries needs a panel of dQ
    for each warpgroup, and with 128 queries the accumulators of a wide v do not fit."""

    def padded(size: int) -> int:
        return -(-size // HEAD_DIM_UNIT) * HEAD_DIM_UNIT

    return {"head_dim": max(padded(head_dim), padded(head_dim_v)), "head_dim_v": padded(head_dim_v)}


def candidates(kernel: Kernel, sizes: dict[str, int]) -> Iterator[Candidate]:
    """Two or three computing warpgroups with 64 rows each, and one that loads."""
    own, other = ("block_kv", "block_q") if kernel.name == "attention_backward" else ("block_q", "block_kv")
    traits: tuple[tuple[str, ...], ...] = (("late",), ()) if kernel.name == "attention_backward" else ((),)
    for warpgroups, block, depths, trait in product((2, 3), BLOCKS, ((2, 2), (2, 1), (1, 1)), traits):
        layouts = dict.fromkeys((item.name for item in _register_tiles(kernel)), (4 * warpgroups, 1))
        if _adds_dq(kernel):
            layout = _dq_layout(warpgroups, block, sizes)
            if layout is None:
                continue
            layouts["dq_acc"] = layout
        staged = [(name, depth) for names, depth in zip(STAGED[kernel.name], depths, strict=True) for name in names]
        exchanged = [("ds_tile", 2)] if _adds_dq(kernel) else []
        yield Candidate(
            blocks=((own, 64 * warpgroups), (other, block)),
            warps=4 * warpgroups + 4,
            stages=(*staged, *exchanged),
            layouts=tuple(layouts.items()),
            traits=trait,
        )


def _adds_dq(kernel: Kernel) -> bool:
    return any(item.name == "ds_tile" for item in kernel.buffers)


def _register_tiles(kernel: Kernel) -> list[Buffer]:
    return [item for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]


def _dq_layout(warpgroups: int, block_q: int, sizes: dict[str, int]) -> tuple[int, int] | None:
    """dQ by rows, or by panels of 64 columns; None where neither gives every warpgroup the same part."""
    if block_q == 64 * warpgroups:
        return 4 * warpgroups, 1
    return (4, warpgroups) if block_q == 64 and sizes["head_dim"] == 64 * warpgroups else None


def make(
    kernel: Kernel, arch: Arch, dims: tuple[tuple[str, int], ...], sizes: dict[str, int], candidate: Candidate
) -> Plan:
    """The plan that a candidate stands for."""
    covered = tuple(tile for name, tile in LEAVES_OVER.items() if any(item.name == name for item in kernel.buffers))
    return Plan(
        kernel=kernel.name,
        arch=arch,
        dims=dims,
        candidate=candidate,
        shared=allocate(kernel, sizes, candidate),
        registers=registers(kernel, sizes, candidate),
        min_blocks=1,
        producer_warps=4,
        role_registers=ROLE_REGISTERS[candidate.warps // 4 - 1],
        mbarriers=_mbarriers(kernel, candidate),
        covered_by_output=covered,
    )


def _mbarriers(kernel: Kernel, candidate: Candidate) -> tuple[tuple[str, int], ...]:
    """Full ones for every tile that is loaded, empty ones where it is loaded again and again."""
    stages = dict(candidate.stages)
    loaded = [name for name in ("k_tile", "v_tile", "q_tile", "dout_tile") if kernel.buffer(name)]
    found = []
    for name in loaded:
        kinds = ("full", "empty") if name in stages else ("full",)
        found += [(f"{name}_{kind}", stages.get(name, 1)) for kind in kinds]
    return tuple(found)


def allocate(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> tuple[Placement, ...]:
    """The map of shared memory: tiles in panels as TMA moves them, then the vectors; results lie over inputs."""
    stages = dict(candidate.stages)
    buffers = [item for item in kernel.buffers if item.space is Space.SHARED and item.name not in LEAVES_OVER]
    placed: dict[str, Placement] = {}
    offset = 0
    for item in sorted(buffers, key=lambda item: -len(item.shape)):
        rows, *cols = (sizes[dim] for dim in item.shape)
        row = panel_bytes(cols[0]) if cols else item.dtype.bytes
        place = Placement(item.name, offset, rows * row, stages.get(item.name, 1), row, swizzled=bool(cols))
        placed[item.name] = place
        offset = place.end
    for name, under in LEAVES_OVER.items():
        if any(item.name == name for item in kernel.buffers):
            place = placed[under]
            placed[name] = Placement(name, place.offset, place.stage_bytes, 1, place.row_bytes, swizzled=True)
    return tuple(sorted(placed.values(), key=lambda place: (place.offset, place.buffer)))


def registers(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> int:
    """The estimate for a thread that computes: tiles where most of them are alive together, and the rest."""
    threads = 32 * (candidate.warps - 4)
    return accumulator_registers(kernel, sizes, threads, dict(candidate.layouts)) + OVERHEAD_REGISTERS


def judge(kernel: Kernel, arch: Arch, sizes: dict[str, int], candidate: Candidate) -> Verdict:
    """Reject a candidate with a sentence, or give its cost."""
    sizes = sizes | dict(candidate.blocks)
    needed = max(place.end for place in allocate(kernel, sizes, candidate)) + BARRIER_BYTES
    if needed > arch.shared_per_block:
        excess = f"{needed / KIB:.1f} KiB of shared memory exceed the {arch.shared_per_block / KIB:.0f} KiB of a block"
        return Verdict(candidate, rejection=excess)
    taken, limit = registers(kernel, sizes, candidate), ROLE_REGISTERS[candidate.warps // 4 - 1][1]
    if taken > limit:
        return Verdict(candidate, rejection=f"about {taken} registers a thread exceed {limit}: it would spill")
    elements = sizes["block_q"] * sizes["block_kv"]
    products = ["head_dim", "head_dim_v", "head_dim"]  # scores, their gradient, and dK or dQ
    products += ["head_dim_v"] if kernel.name == "attention_backward" else []
    products += ["head_dim"] if _adds_dq(kernel) else []
    depth = sum(sizes[name] for name in products)
    matrix = elements * depth / arch.matrix_rate
    softmax = elements * (1 / arch.exp_rate + 4 / 128)
    single = sum(count == 1 for name, count in candidate.stages if name in ("q_tile", "dout_tile", "k_tile", "v_tile"))
    clocks = (matrix + softmax / 2 + STEP_LATENCY * (1 + single / 8)) * (1 if "late" in candidate.traits else EARLY)
    why = (
        f"{needed / KIB:.1f} KiB, {taken} registers; a step takes {matrix:.0f} clocks of matrix work, "
        f"{softmax:.0f} of softmax"
    )
    return Verdict(candidate, cost=clocks * 1e6 / (2 * elements * depth), why=why)
