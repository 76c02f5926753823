"""The sm90 family's part of the planner: candidates by warpgroups, the register budget of each, and their cost.

A warpgroup owns 64 rows of queries. The register file is shared by setmaxnreg: (producer, consumer) registers a thread
for one, two and three computing warpgroups, or for one in each of two or three blocks that run together: where tiles
have few steps, the beginnings and ends of one then lie beside the steps of the others.

Traits of a candidate: "persistent" (a block takes tiles in a fixed order) or "dynamic" (it asks for its next one), "in
turns" (the warpgroups issue their products one after the other), "guessed maximum" (softmax does not wait for maxima),
"last block first" (the blocks of keys are walked through backwards).
Kernels with functions have each candidate with a guess and without; where scores may rise with the keys also with a
guess and backwards, which only a measurement chooses: in what direction they rise is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from flashgen.attention.varlen import ROW_BLOCK
from flashgen.ir.graph import remembered
from flashgen.ir.nodes import Copy, Kernel, Window, name_of
from flashgen.ir.visit import heads_in_tile, statements
from flashgen.plan import cost
from flashgen.plan.arch import Arch
from flashgen.plan.candidates import tile_names
from flashgen.plan.plan import KIB, LAST_FIRST, Candidate, Placement, Plan, Verdict
from flashgen.plan.smem import panel_bytes
from flashgen.plan.wide import WARPGROUPS, divides_output, is_wide, output_layouts, shares_values

ROLE_REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# Working out where tiles lie spills in a producer with 24 registers.
PERSISTENT_REGISTERS = ROLE_REGISTERS | {2: (40, 232)}
# Of a block with one computing warpgroup, where a multiprocessor has more of them than one.
RESIDENT_REGISTERS = {2: (40, 216), 3: (24, 136)}
# Their threads begin with 128 and 80 registers; ptxas takes no product whose accumulator leaves few of these (C7602).
RESIDENT_COLUMNS = {2: 192, 3: 96}
# Beside a score function, counted on compiled kernels: ALiBi spilled 60 to 92 bytes.
RESIDENT_SCORE_REGISTERS = 24
# Addresses, loop counters, row maxima and sums beside the tiles, counted on compiled kernels.
OVERHEAD_REGISTERS = 30
# Beside a score function, or a mask of more than two comparisons. From so many special functions on, the compiler
# computes one of them for all elements before the next, which takes another tile.
FUNCTION_REGISTERS = 8
MANY_FUNCTIONS = 4
# Beside what functions load, where heads share a tile and lists of blocks are walked: counted on compiled kernels.
LISTED_REGISTERS = 8
# Where two products of different steps read the keys' tiles, each with its stage: counted on compiled kernels.
SHARED_REGISTERS = 8
# Beside functions, where two warpgroups divide O: counted on compiled kernels, of heads packed in a tile the most.
DIVIDED_REGISTERS = 16
BLOCKS_KV = (64, 80, 96, 112, 128, 144, 160, 176, 192)
# Of head dims over 256, whose tiles leave room for fewer keys, and perhaps for one stage of these.
WIDE_BLOCKS_KV = (16, 32, 48, *BLOCKS_KV)
WIDE_STAGES = ((2, 2), (2, 1), (1, 1))
# Of keys that are values too, and so are read in two steps: the scores of the next are issued before their product.
SHARED_STAGES = ((2,), (3,), (4,))
# Clocks of a step that no other warpgroup's work covers (fitted on an H200).
STEP_LATENCY = 300
# The time that a fixed order of tiles takes, where asking for the next takes 1: 0.98 at 4096, 1.05 at 512.
FIXED_ORDER = 1.01
# The time with Q in two stages, so that the next tile's is loaded early, where one takes 1: 0.9 to 1 at 512 and 1024,
# 0.96 to 1.04 from 2048 on (an H200, head_dim 64 and 128).
Q_AHEAD = 0.99
# Three computing warpgroups: 1.01 to 1.07 times as fast where each ends with its own last block (an H200, head_dim 64
# causal, 16k to 512). Two, whose rows mostly see as many blocks: 0.98 to 1.
OWN_BLOCKS_WARPS = 16
GUESS = "guessed maximum"
# The time without a guess, where that with one takes 1: 1.02 to 1.12 (an H200, docs/benchmarks.md, 2026-11-30).
NO_GUESS = 1.06
# The time with a guess that is too low in most steps, which are then computed twice, the second time with mma.sync: an
# H200 does 261 TFLOP/s with ALiBi and a guess, and 502 without ALiBi (head_dim 64, causal).
LOW_GUESS = 2.0
RISING = (
    "no guess of the maximum: the score function has kv_idx in it, and where scores rise with it most steps would be "
    "computed twice"
)
PACKING = (
    "calls with few queries of grouped heads take a kernel in which 2 to 64 heads share a tile (--packed shows it)"
)
# Bytes of the L2 in a clock of one multiprocessor, taken for 5.5 TB/s; not fitted, but kernels that load keys and
# values alone come near to it: 5.0 TB/s at 640 TFLOP/s with tiles of 128 x 128 (an H200, head_dim 128).
L2_BYTES_PER_CLOCK = 24
BARRIER_BYTES = 256  # at most, with the places of the next tiles
PLACE_BYTES = 32
# The time with tiles that are no whole blocks of a list, where one with such tiles takes 1: they have a part in more
# blocks that are partial. By counts of 16 documents in 16384 tokens, 160 keys against 128.
LIST_BLOCK, RAGGED_LIST = 64, 1.06
INPUTS = (("q_tile", "block_q", "head_dim"), ("k_tile", "block_kv", "head_dim"), ("v_tile", "block_kv", "head_dim_v"))
CACHED_BYTES = 16 * 1024 * KIB  # of keys and values that are read at the same time, in an L2 of 50 MB and more


def candidates(kernel: Kernel, sizes: Mapping[str, int]) -> Iterator[Candidate]:
    """One, two or three computing warpgroups, and one that loads.

    Each has 64 rows of queries, or two divide the columns of the same 64.
    """
    wide, divided = is_wide(sizes), divides_output(kernel, sizes)
    blocks_kv = WIDE_BLOCKS_KV if wide else BLOCKS_KV
    depths: tuple[tuple[int, ...], ...] = WIDE_STAGES if wide else ((2, 2),)
    depths = SHARED_STAGES if shares_values(kernel) else depths
    counts = [(WARPGROUPS, 1)] if divided else [(1, 1), (2, 1), (3, 1)]
    # Wide tiles, or those of more than queries, keys and values, leave no room for several blocks.
    counts += [] if wide or divided or added_tiles(kernel) else [(1, resident) for resident in RESIDENT_REGISTERS]
    uneven = kernel.axes[0].longest_first or kernel.axes[0].name == ROW_BLOCK.name
    orders = ("dynamic",) if uneven else ("dynamic", "persistent")
    # What is dropped would hide a guess that was too low, and random numbers take longer than maxima.
    guesses: tuple[tuple[str, ...], ...] = () if cost.draws(kernel) else ((GUESS,),)
    more = cost.takes_functions(kernel)
    added = tuple((name, 2) for name in added_tiles(kernel))
    guesses += ((),) if more else ()
    backwards = cost.rises(kernel) and not cost.loads_limits(kernel) and not cost.draws(kernel)
    guesses += ((GUESS, LAST_FIRST),) if backwards else ()
    every = product(counts, blocks_kv, depths, orders, (False, True), guesses)
    for (warpgroups, resident), block_kv, stages, order, ahead, guess in every:
        if ahead and more and warpgroups == 3:
            continue  # 160 registers are too few then: 8 to 70 bytes are spilled
        if resident > 1 and max(block_kv, sizes["head_dim_v"]) > RESIDENT_COLUMNS[resident]:
            continue
        if resident > 2 and ahead and kernel.axes[0].name == ROW_BLOCK.name:
            continue  # the producer's 24 registers are too few to find sequences then: 8 bytes are spilled
        turns = ("in turns",) if warpgroups > 1 else ()
        along_rows, across = (1, warpgroups) if divided else (warpgroups, 1)
        yield Candidate(
            blocks=(("block_q", 64 * along_rows), ("block_kv", block_kv)),
            warps=4 * warpgroups + 4,
            stages=(*zip(("k_tile", "v_tile"), stages, strict=False), *added, *((("q_tile", 2),) if ahead else ())),
            layouts=output_layouts(tile_names(kernel), 4 * along_rows, across),
            traits=(order, *turns, *guess),
            resident=resident,
        )


@remembered
def added_tiles(kernel: Kernel) -> tuple[str, ...]:
    """The shared tiles of rows of queries and columns of keys that are loaded: score functions read their elements."""
    copies = (stmt for stmt in statements(kernel.body) if isinstance(stmt, Copy) and isinstance(stmt.src, Window))
    loaded = {name_of(stmt.dst) for stmt in copies}
    return tuple(item.name for item in kernel.buffers if item.shape == ("block_q", "block_kv") and item.name in loaded)


def make(
    kernel: Kernel, arch: Arch, dims: tuple[tuple[str, int], ...], sizes: dict[str, int], candidate: Candidate
) -> Plan:
    """The plan that a candidate stands for."""
    shared, covered = allocate(sizes, candidate, arch.shared_for(candidate.resident))
    return Plan(
        kernel=kernel.name,
        arch=arch,
        dims=dims,
        candidate=candidate,
        shared=shared,
        registers=registers_with(kernel, sizes, candidate),
        min_blocks=candidate.resident,
        producer_warps=4,
        role_registers=role_registers(candidate),
        mbarriers=_mbarriers(candidate, covered),
        covered_by_output=covered,
        keys_in_cache=CACHED_BYTES // (2 * (sizes["head_dim"] + sizes["head_dim_v"] * (not shares_values(kernel)))),
        packed=heads_in_tile(kernel),
        own_blocks=_differs_by_rows(kernel) and candidate.warps == OWN_BLOCKS_WARPS,
        variants=(PACKING,) * (heads_in_tile(kernel) == 1) + (RISING,) * _warned(kernel, candidate),
    )


def _differs_by_rows(kernel: Kernel) -> bool:
    """True where later rows of a tile may see later blocks of keys than its first ones, which are no lists."""
    axis = kernel.axes[0]
    uneven = axis.longest_first or axis.name == ROW_BLOCK.name
    return uneven and not cost.listed(kernel) and heads_in_tile(kernel) == 1


def _warned(kernel: Kernel, candidate: Candidate) -> bool:
    """True for a candidate that is without a guess for the sake of scores that may rise with the keys."""
    return GUESS not in candidate.traits and cost.rises(kernel) and not cost.draws(kernel)


def _mbarriers(candidate: Candidate, covered: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Full and empty ones for every stage that is loaded again and again."""
    found = [(f"{name}_{kind}", count) for name, count in candidate.stages for kind in ("full", "empty")]
    if "q_tile" not in dict(candidate.stages):
        found += [("q_tile_full", 1), *([("q_tile_empty", 1)] if candidate.persistent else [])]
    found += [("o_tile_empty", 1)] if candidate.persistent and covered else []
    found += [("next_tile_full", 2), ("next_tile_empty", 2)] if candidate.persistent else []
    return tuple(found)


def role_registers(candidate: Candidate) -> tuple[int, int]:
    """Registers a thread of the producer and of the computing warps."""
    if candidate.resident > 1:
        return RESIDENT_REGISTERS[candidate.resident]
    budget = PERSISTENT_REGISTERS if candidate.persistent else ROLE_REGISTERS
    return budget[candidate.warps // 4 - 1]


def allocate(sizes: dict[str, int], candidate: Candidate, limit: int) -> tuple[tuple[Placement, ...], tuple[str, ...]]:
    """The map of shared memory, all tiles in panels as TMA moves them, and the tiles that O lies over.

    O has memory of its own where there is room in `limit` bytes, so that it leaves while the next tile is loaded; else
    it lies over the stages of V, which a tile needs last, or of K where these are its values.
    """
    stages = dict(candidate.stages)
    placed: list[Placement] = []
    offset = 0
    given = [item for item in INPUTS if item[0] in ("q_tile", *stages)]
    added = [(name, "block_q", "block_kv") for name in stages if name not in (name for name, *_ in INPUTS)]
    for name, rows, cols in (*added, *given):  # V last: O may lie over it
        placed.append(_panels(name, offset, sizes[rows], sizes[cols], stages.get(name, 1)))
        offset = placed[-1].end
    covered: tuple[str, ...] = ()
    output = _panels("o_tile", offset, sizes["block_q"], sizes["head_dim_v"], 1)
    if output.end + BARRIER_BYTES > limit:
        output, covered = replace(output, offset=placed[-1].offset), (placed[-1].buffer,)
    placed.append(output)
    if candidate.persistent:
        placed.append(Placement("next_tile", max(place.end for place in placed), PLACE_BYTES, 2, PLACE_BYTES))
    return tuple(sorted(placed, key=lambda place: (place.offset, place.buffer))), covered


def _panels(name: str, offset: int, rows: int, cols: int, stages: int) -> Placement:
    return Placement(name, offset, rows * panel_bytes(cols), stages, panel_bytes(cols), swizzled=True)


def registers_with(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> int:
    """`registers`, and what depends on more of the candidate than its blocks."""
    beside = RESIDENT_SCORE_REGISTERS if candidate.resident > 1 and cost.scores(kernel) else 0
    return registers(kernel, sizes) + _unguessed_registers(kernel, sizes, candidate) + beside


def registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """The estimate for a thread that computes: scores, the packed operand that is still read, output, and the rest."""
    width = sizes["head_dim_v"] // (WARPGROUPS if divides_output(kernel, sizes) else 1)
    tiles = sizes["block_kv"] // 2 + sizes["block_kv"] // 4 + width // 2
    tiles += _added_registers(kernel, sizes) + _loading_registers(kernel, sizes)
    tiles += SHARED_REGISTERS * shares_values(kernel)
    tiles += DIVIDED_REGISTERS * (divides_output(kernel, sizes) and cost.takes_functions(kernel))
    return tiles + OVERHEAD_REGISTERS + _function_registers(kernel, sizes) + _random_registers(kernel, sizes)


def _added_registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """What is added to the scores, packed; some of it takes the place of what functions take (counted)."""
    return max(sizes["block_kv"] // 4 * len(added_tiles(kernel)) - FUNCTION_REGISTERS, 0)


def _unguessed_registers(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> int:
    """More where maxima are computed at once, of scores with the number of the key in them and no mask of `causal`.

    The compiler then works out what is added to all elements ahead of the product. Counted on ALiBi, head_dim 64, 128
    and 256: what tiles of 64 to 144 keys spilled with NVRTC 13.5. With documents beside, up to 116 bytes.
    """
    loads = _warned(kernel, candidate) and cost.loaded_values(kernel, sizes, (1, 1))
    beside = max(0, sizes["block_kv"] // 4 - 16) if loads else 0
    ahead = _warned(kernel, candidate) and not kernel.axes[0].longest_first
    return beside + (5 * sizes["block_kv"] // 8 - 22 if ahead else 0)


def _random_registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """What random numbers take, counted on compiled kernels: with more registers the compiler makes more at a time."""
    if not cost.draws(kernel):
        return 0
    place = cost.PLACE_REGISTERS * cost.draws_in_sequences(kernel)
    if sizes["block_q"] == 192:
        return (24 if cost.scores(kernel) else 8) + place
    return max(8, sizes["block_kv"] // 2 - 16) + place


def _loading_registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """What functions load, and its addresses, for some elements ahead where these differ by row and column."""
    addresses = cost.ADDRESS_REGISTERS + sizes["block_kv"] // 4
    return cost.loaded_registers(kernel, sizes, (sizes["block_q"] // 16, 1), addresses)


def _function_registers(kernel: Kernel, sizes: dict[str, int]) -> int:
    """What score functions, and masks beyond causal, take beside: counted on compiled kernels."""
    functions, more = cost.on_scores(kernel)
    if functions >= MANY_FUNCTIONS:
        return sizes["block_kv"] // 2
    least = FUNCTION_REGISTERS if more or cost.loaded_values(kernel, sizes, (1, 1)) else 0
    beside = LISTED_REGISTERS if cost.loads_limits(kernel) and heads_in_tile(kernel) > 1 else 0
    return beside + max(least, cost.function_registers(kernel, sizes, (sizes["block_q"] // 16, 1)))


def judge(kernel: Kernel, arch: Arch, sizes: dict[str, int], candidate: Candidate) -> Verdict:
    """Reject a candidate with a sentence, or give its cost."""
    sizes = sizes | dict(candidate.blocks)
    warpgroups, packed = candidate.warps // 4 - 1, heads_in_tile(kernel)
    if packed > 1 and sizes["block_q"] & (sizes["block_q"] - 1):
        sentence = f"{sizes['block_q']} rows of {packed} heads: the 64 of a warpgroup do not leave by one copy"
        return Verdict(candidate, rejection=sentence, unfit=True)
    room = arch.shared_for(candidate.resident)
    needed = max(place.end for place in allocate(sizes, candidate, room)[0]) + BARRIER_BYTES
    if needed > room:
        excess = f"{needed / KIB:.1f} KiB of shared memory exceed the {room / KIB:g} KiB of a block"
        return Verdict(candidate, rejection=excess)
    taken = registers_with(kernel, sizes, candidate)
    limit = role_registers(candidate)[1]
    if taken > min(limit, arch.max_registers):
        return Verdict(candidate, rejection=f"about {taken} registers a thread exceed {limit}: it would spill")
    elements = sizes["block_q"] * sizes["block_kv"]
    copies = WARPGROUPS if divides_output(kernel, sizes) else 1
    matrix = elements * (copies * sizes["head_dim"] + sizes["head_dim_v"]) / arch.matrix_rate
    softmax = copies * elements * (1 / arch.exp_rate + 3 / 128)
    latency = (STEP_LATENCY if warpgroups > 1 else 2 * STEP_LATENCY) / candidate.resident
    held = 2 if shares_values(kernel) else 1  # stages in use, so that with no more of them a load is waited for
    latency += STEP_LATENCY * sum(count == held for name, count in candidate.stages if name != "q_tile")
    clocks = max(matrix, softmax) + min(matrix, softmax) / (1 + warpgroups * candidate.resident) + latency
    clocks = max(clocks, _traffic(kernel, sizes, candidate) / L2_BYTES_PER_CLOCK)
    total = clocks * 1e6 / (2 * elements * (sizes["head_dim"] + sizes["head_dim_v"])) * _factor(kernel, candidate)
    why = (
        f"{needed / KIB:.1f} KiB, {taken} registers; a step takes {matrix:.0f} clocks of matrix work, "
        f"{softmax:.0f} of softmax" + ", most steps twice" * (GUESS in candidate.traits and cost.rises(kernel))
    ) + ", both warpgroups computing the scores" * (copies > 1)
    return Verdict(candidate, cost=total, why=why)


def _traffic(kernel: Kernel, sizes: dict[str, int], candidate: Candidate) -> int:
    """Bytes that a step loads where tiles of rows and columns are among them, or for few rows of queries; else 0."""
    added = len(added_tiles(kernel)) * sizes["block_q"] * panel_bytes(sizes["block_kv"])
    keys = sizes["block_kv"] * (panel_bytes(sizes["head_dim"]) + panel_bytes(sizes["head_dim_v"]))
    return added + keys if added or candidate.resident > 1 else 0


def _factor(kernel: Kernel, candidate: Candidate) -> float:
    """What the order of tiles, Q in two stages and the guess of the maximum do to the time."""
    order = FIXED_ORDER if "persistent" in candidate.traits else 1
    ahead = Q_AHEAD if "q_tile" in dict(candidate.stages) else 1
    if cost.listed(kernel) and dict(candidate.blocks)["block_kv"] % LIST_BLOCK:
        order *= RAGGED_LIST
    if GUESS in candidate.traits:
        return order * ahead * (LOW_GUESS if cost.rises(kernel) else 1)
    # What draws has no candidate with a guess to compare with.
    return order * ahead * (1 if cost.draws(kernel) else NO_GUESS)
