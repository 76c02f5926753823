"""The sm90 family's part of the planner for the kernels of the backward.

`attention_backward`: each computing warpgroup owns 64 rows of keys and walks over blocks of queries. Scores, their
gradient and both accumulators are in its registers; dS goes through shared memory for dQ, whose rows (or, where a block
has 64 queries, whose columns) the warpgroups divide among them. Where a block has another number of queries dQ is kept
transposed: its rows are columns of K, and the warpgroups divide these.
`attention_backward_dq`: each owns 64 rows of queries and walks over blocks of keys.

Where a head is too wide for both accumulators, dQ is left to the second kernel, and two warpgroups divide the products
of the first for 64 rows of keys.

Traits of a candidate: "late" (the product of P and dO is issued when dS is done, not before it is computed), "divided"
(one warpgroup computes P and dV, the other dP, dS and dK), "dQ transposed".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from flashgen.ir.nodes import Buffer, Kernel, Space
from flashgen.plan.arch import Arch
from flashgen.plan.cost import (
    accumulator_registers,
    draws,
    function_registers,
    loaded_registers,
    loaded_values,
    on_scores,
    scores,
    takes_functions,
)
from flashgen.plan.plan import KIB, Candidate, Placement, Plan, Verdict
from flashgen.plan.sm90 import BARRIER_BYTES, MANY_FUNCTIONS, ROLE_REGISTERS, added_tiles
from flashgen.plan.smem import panel_bytes
from flashgen.plan.transposed import TRANSPOSED, as_planned

KERNELS = ("attention_backward", "attention_backward_dq")
# Up to here a warpgroup has room for both accumulators of 64 rows of keys beside the scores of 64 queries.
UNDIVIDED = 128
# Where the columns of dQ are divided each warpgroup takes a panel of 64.
HEAD_DIM_UNIT = 64
# Addresses, counters, the vectors of a step, counted on compiled kernels.
OVERHEAD_REGISTERS = 16
# The same in the main kernel where no function takes part: 80 queries then fit at head_dim 128.
PLAIN_OVERHEAD_REGISTERS = 12
# The same where functions load elements that differ by row and column: the vectors of the step are not there yet.
LOADING_REGISTERS = 16
BLOCKS = (64, 80, 96, 112, 128)
# Clocks of a step that no other work covers (fitted on an H200).
STEP_LATENCY = 1400
# What a single stage adds to that, as a part of it. The first tile of a step is read again by its last product, so with
# one stage of it no load runs while it computes (an H200, head_dim 256: -15 to -20 %); the second waits a little.
SINGLE_STAGE = {"q_tile": 3 / 4, "k_tile": 3 / 4, "dout_tile": 1 / 8, "v_tile": 1 / 8}
# Of a tile that is free as soon as it is in registers, while the step goes on (not measured yet).
ADDED_SINGLE_STAGE = 1 / 8
# The time of a step whose product of P and dO is issued early, where "late" takes 1: issuing a product with an operand
# in registers holds its warps up until it runs (an H200 at 4096: 1.02 to 1.12).
EARLY = 1.06
STAGED = {
    "attention_backward": (("q_tile", "lse_tile"), ("dout_tile", "delta_tile")),
    "attention_backward_dq": (("k_tile",), ("v_tile",)),
}
# Where a result leaves: over an input of its size that no warp reads any more. Of divided work, over an input that only
# its own warpgroup has read.
LEAVES_OVER = {"dk_tile": "k_tile", "dv_tile": "v_tile", "dq_tile": "q_tile"}
DIVIDED_LEAVES_OVER = {"dk_tile": "v_tile", "dv_tile": "k_tile"}
HANDED = "p_tile"  # through which P goes from one warpgroup to the other
ADDED = "dq_part"  # through which dQ goes to its accumulator, in the order of the registers


def head_dims(head_dim: int, head_dim_v: int) -> dict[str, int]:
    """Head dims padded to whole panels; that of q and k to that of v, since a block of 64 queries needs a panel of dQ
    for each warpgroup, and with 128 queries the accumulators of a wide v do not fit."""

    def padded(size: int) -> int:
        return -(-size // HEAD_DIM_UNIT) * HEAD_DIM_UNIT

    return {"head_dim": max(padded(head_dim), padded(head_dim_v)), "head_dim_v": padded(head_dim_v)}


def candidates(kernel: Kernel, sizes: dict[str, int]) -> Iterator[Candidate]:
    """Two or three computing warpgroups with 64 rows each, or two that have the same 64 rows, and one that loads."""
    if kernel.name == "attention_backward" and dq_apart(sizes["head_dim"], sizes["head_dim_v"]):
        yield from _divided_candidates(kernel)
        return
    own, other = ("block_kv", "block_q") if kernel.name == "attention_backward" else ("block_q", "block_kv")
    traits: tuple[tuple[str, ...], ...] = (("late",), ()) if _has_trait(kernel) else ((),)
    for warpgroups, block, depths, trait, added in product(
        (2, 3), BLOCKS, ((2, 2), (2, 1), (1, 1)), traits, _added(kernel)
    ):
        layouts = dict.fromkeys((item.name for item in _register_tiles(kernel)), (4 * warpgroups, 1))
        turned: tuple[str, ...] = ()
        if _adds_dq(kernel):
            layout = _dq_layout(warpgroups, block, sizes)
            if layout is not None:
                layouts["dq_acc"] = layout
            elif sizes["head_dim"] == 64 * warpgroups and not draws(kernel):  # random numbers spill 8 to 92 bytes
                turned = (TRANSPOSED,)
            else:
                continue
        staged = [(name, depth) for names, depth in zip(STAGED[kernel.name], depths, strict=True) for name in names]
        exchanged = [("ds_tile", 2)] if _adds_dq(kernel) else []
        yield Candidate(
            blocks=((own, 64 * warpgroups), (other, block)),
            warps=4 * warpgroups + 4,
            stages=(*staged, *added, *exchanged),
            layouts=tuple(layouts.items()),
            traits=(*trait, *turned),
        )


def _added(kernel: Kernel) -> list[tuple[tuple[str, int], ...]]:
    """The stages of tiles that score functions read: two, or one, which is free as soon as it is in registers."""
    names = added_tiles(kernel)
    return [tuple((name, depth) for name in names) for depth in ((2, 1) if names else (1,))]


def dq_apart(head_dim: int, head_dim_v: int) -> bool:
    """True where dQ has a kernel of its own: a warpgroup cannot hold both accumulators of the other results."""
    return max(head_dim, head_dim_v) > UNDIVIDED


def _divided_candidates(kernel: Kernel) -> Iterator[Candidate]:
    layouts = tuple((item.name, (4, 1)) for item in _register_tiles(kernel))
    for block_q, (q, dout), handed, added in product(BLOCKS, ((2, 2), (2, 1), (1, 1)), (2, 1), _added(kernel)):
        stages = (("q_tile", q), ("lse_tile", q), ("dout_tile", dout), ("delta_tile", dout), *added, (HANDED, handed))
        blocks = (("block_kv", 64), ("block_q", block_q))
        yield Candidate(blocks, 12, stages, layouts, ("divided",))


def _has_trait(kernel: Kernel) -> bool:
    """True for the kernel that multiplies P and dO, early or late."""
    return kernel.name == "attention_backward"


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
    kernel = as_planned(kernel, candidate)
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
        covered_by_output=tuple(_leaves_over(kernel, sizes, candidate).values()),
    )


def _mbarriers(kernel: Kernel, candidate: Candidate) -> tuple[tuple[str, int], ...]:
    """Full ones for every tile that is loaded, empty ones where it is loaded again and again."""
    stages = dict(candidate.stages)
    loaded = [name for name in ("k_tile", "v_tile", "q_tile", "dout_tile") if kernel.buffer(name)]
    loaded += added_tiles(kernel)
    found = []
    for name in loaded:
        kinds = ("full", "empty") if name in stages else ("full",)
        found += [(f"{name}_{kind}", stages.get(name, 1)) for kind in kinds]
    if HANDED in stages:
        found += [(f"{HANDED}_{kind}", stages[HANDED]) for kind in ("full", "empty")]
    return tuple(found)


def _leaves_over(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> dict[str, str]:
    """The tiles through which results leave, and the inputs that these lie over, where they have room."""
    over = DIVIDED_LEAVES_OVER if "divided" in candidate.traits else LEAVES_OVER

    def size(name: str) -> int:
        return math.prod(sizes[dim] for dim in kernel.buffer(name).shape)

    names = {item.name for item in kernel.buffers}
    return {name: tile for name, tile in over.items() if name in names and size(name) <= size(tile)}


def allocate(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> tuple[Placement, ...]:
    """The map of shared memory: tiles in panels as TMA moves them, then the vectors; results lie over inputs."""
    stages, over = dict(candidate.stages), _leaves_over(kernel, sizes, candidate)
    buffers = [item for item in kernel.buffers if item.space is Space.SHARED and item.name not in over]
    placed: dict[str, Placement] = {}
    offset = 0
    for item in sorted(buffers, key=lambda item: -len(item.shape)):
        rows, *cols = (sizes[dim] for dim in item.shape)
        row = panel_bytes(cols[0]) if cols else item.dtype.bytes
        place = Placement(item.name, offset, rows * row, stages.get(item.name, 1), row, swizzled=bool(cols))
        placed[item.name] = place
        offset = place.end
    if HANDED in stages:
        row = 4 * sizes["block_q"]
        placed[HANDED] = Placement(HANDED, offset, sizes["block_kv"] * row, stages[HANDED], row)
        offset = placed[HANDED].end
    if _adds_dq(kernel):
        height, width = (sizes[dim] for dim in kernel.buffer("dq_acc").shape)
        placed[ADDED] = Placement(ADDED, offset, 4 * height * width, 1, 4 * width)
    for name, under in over.items():
        place = placed[under]
        placed[name] = Placement(name, place.offset, place.stage_bytes, 1, place.row_bytes, swizzled=True)
    return tuple(sorted(placed.values(), key=lambda place: (place.offset, place.buffer)))


def registers(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> int:
    """The estimate for a thread that computes: tiles where most of them are alive together, and the rest."""
    if "divided" in candidate.traits:
        widest, tile = max(sizes["head_dim"], sizes["head_dim_v"]), sizes["block_q"]
        loaded = loaded_registers(kernel, sizes, (4, 1), LOADING_REGISTERS)
        loading = (widest + tile) // 2 + loaded if loaded else 0  # dV, the scores
        random = 12 * (draws(kernel) and scores(kernel))
        tiles = (widest + tile) // 2 + tile // 4 * len(added_tiles(kernel))  # dV, the scores, what is added to them
        alive = max((widest + 2 * tile + tile // 2) // 2, loading, tiles)  # dK or dV, P, dP, dS
        return alive + OVERHEAD_REGISTERS + random
    threads = 32 * (candidate.warps - 4)
    tiles = accumulator_registers(kernel, sizes, threads, dict(candidate.layouts))
    replaced = "late" in candidate.traits if _has_trait(kernel) else on_scores(kernel)[0] < MANY_FUNCTIONS
    if replaced and any(item.name == "slope" for item in kernel.buffers):
        # P is multiplied by the slope while it is packed, so that the one replaces the other piece by piece. Compiled
        # by NVRTC 13.5 that holds in both kernels, but not without "late" (4 to 12 bytes are spilled), and for dQ alone
        # not with many functions (24).
        tiles -= sizes["block_q"] * sizes["block_kv"] // 2 // threads
    plain = not (takes_functions(kernel) or loaded_values(kernel, sizes, (threads // 32, 1)))
    plain &= kernel.name == "attention_backward"
    overhead = (PLAIN_OVERHEAD_REGISTERS if plain else OVERHEAD_REGISTERS) + _random_registers(kernel, sizes)
    computing = _while_computing(kernel, sizes, threads), _while_loading(kernel, sizes, threads)
    return max(tiles + overhead, *computing, _while_adding(kernel, sizes, threads))


def _random_registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """What random numbers take where there are functions too, counted on compiled kernels: with fewer, some of them
    spill 4 to 190 bytes. Without functions there are none that spill; beside a window some do, by 8 bytes, which is
    less than another kernel for dQ."""
    if not (draws(kernel) and on_scores(kernel)[1]):
        return 0
    if kernel.name == "attention_backward":
        return 8 * scores(kernel)
    return sizes["block_kv"] // 2 - 8


def _while_computing(kernel: Kernel, sizes: dict[str, int], threads: int) -> int:
    """Registers of a thread where masks and score functions are computed: dP is computed beside the scores by then.

    The slope is not there yet, or is itself what they take.
    """
    taken = function_registers(kernel, sizes, (threads // 32, 1))
    return _held(kernel, sizes, threads, {"s", "dp"}) + taken + OVERHEAD_REGISTERS if taken else 0


def _held(kernel: Kernel, sizes: dict[str, int], threads: int, beside: set[str]) -> int:
    """Registers of the accumulators of results, and of the tiles beside them."""
    results = {"dk_acc", "dv_acc"} if kernel.name == "attention_backward" else {"dq_acc"}
    tiles = [item for item in _register_tiles(kernel) if item.name in results | beside]
    return sum(math.prod(sizes[dim] for dim in item.shape) // threads for item in tiles)


def _while_loading(kernel: Kernel, sizes: dict[str, int], threads: int) -> int:
    """Registers of a thread where functions load from arrays: dP is computed beside the scores by then."""
    loaded = loaded_registers(kernel, sizes, (threads // 32, 1), LOADING_REGISTERS)
    return loaded + _held(kernel, sizes, threads, {"s", "dp", "slope"}) if loaded else 0


def _while_adding(kernel: Kernel, sizes: dict[str, int], threads: int) -> int:
    """Registers of a thread where tiles of what is added to the scores are there, packed."""
    added = sizes["block_q"] * sizes["block_kv"] // 2 // threads * len(added_tiles(kernel))
    return added + _held(kernel, sizes, threads, {"s", "dp", "slope"}) + OVERHEAD_REGISTERS if added else 0


def judge(kernel: Kernel, arch: Arch, sizes: dict[str, int], candidate: Candidate) -> Verdict:
    """Reject a candidate with a sentence, or give its cost."""
    sizes, kernel = sizes | dict(candidate.blocks), as_planned(kernel, candidate)
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
    single = SINGLE_STAGE | dict.fromkeys(added_tiles(kernel), ADDED_SINGLE_STAGE)
    waited = sum(single.get(name, 0) for name, count in candidate.stages if count == 1)
    clocks = (matrix + softmax / 2 + STEP_LATENCY * (1 + waited)) * (1 if "late" in candidate.traits else EARLY)
    why = (
        f"{needed / KIB:.1f} KiB, {taken} registers; a step takes {matrix:.0f} clocks of matrix work, "
        f"{softmax:.0f} of softmax"
    )
    return Verdict(candidate, cost=clocks * 1e6 / (2 * elements * depth), why=why)
