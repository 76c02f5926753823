"""The planner: enumerate, reject with a sentence, rank the rest by cost, take the best.

The order is total (cost, then the candidate's text), so the choice is deterministic. plan/tuned.py overrides it where
a measurement on a named card says so.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from flashgen.attention.varlen import PADDING as _PADDING
from flashgen.calculus import unguarded
from flashgen.ir.dtype import FP32, TF32
from flashgen.ir.expr import Const, Select, Var, text
from flashgen.ir.nodes import Kernel, Map, Space
from flashgen.ir.visit import statements
from flashgen.plan import cost, sm90, sm90_backward, smem, tuned, wide
from flashgen.plan.arch import Arch
from flashgen.plan.candidates import candidates, tile_names
from flashgen.plan.operands import through_shared
from flashgen.plan.plan import KIB, Candidate, Plan, Verdict
from flashgen.plan.transposed import TRANSPOSED
from flashgen.spec import Spec

log = logging.getLogger("flashgen")
PADDING = _PADDING.name
SUMS = (4, 64, 64)  # warps, rows and columns: 32 numbers a thread, on a grid of few blocks


class PlanError(ValueError):
    """No candidate fits the chip."""


def plan(kernel: Kernel, spec: Spec, arch: Arch, may_spill: bool = False) -> Plan:
    """The plan of one kernel, with every candidate's verdict; PlanError names the limit where none fits.

    may_spill: where none fits, take the one that exceeds the registers least. What functions load is estimated from
    above, and slow is better than refused.
    """
    verdicts = judged(kernel, arch, head_dims(spec, arch, kernel.name))
    if not verdicts or verdicts[0].rejection:
        closest = min((v for v in verdicts if may_spill and v.excess), key=_beyond, default=None)
        if closest is not None:
            log.info("%s: no tile of %s has the registers; %s may spill", spec, kernel.name, closest.candidate)
            made = make(kernel, spec, arch, closest.candidate)
            return replace(made, verdicts=tuple(verdicts), source="the fewest registers: it may spill")
        least = min(verdicts, key=_size)
        raise PlanError(f"no tile of {kernel.name} fits {arch.name}: even {least.candidate}: {least.rejection}")
    measured, own = tuned.lookup(kernel.name, spec, arch), tuned.has_own(kernel.name, spec, arch)
    unguessed = False
    if measured and not own and cost.rises(kernel):
        unguessed, measured = sm90.GUESS in measured.traits, measured.without(sm90.GUESS)
    chosen, source = _choose(verdicts, measured)
    if source.startswith("measurement"):
        source += tuned.measured_with(kernel.name, spec, arch)
        source += ", with a guess of the maximum" * unguessed
        source += ", with sequences of one length" * spec.varlen
        source += ", with one head in a tile" * (spec.packed > 1)
    made = make(kernel, spec, arch, chosen)
    variants = (*made.variants, *tuned.by_length(kernel.name, spec, arch), *_unguarded(kernel))
    return replace(made, verdicts=tuple(verdicts), source=source, variants=variants)


def _unguarded(kernel: Kernel) -> list[str]:
    """A sentence for each part of the mask that no tile is spared."""
    found = []
    for stmt in statements(kernel.body):
        if isinstance(stmt, Map) and stmt.note == "mask" and isinstance(stmt.expr, Select):
            shape = kernel.buffer(stmt.dst).shape
            ranges = {name: (Const(0), Var(dim) - 1) for name, dim in zip("ij", shape, strict=True)}
            found += unguarded(stmt.expr.condition, ranges)
    return [f"evaluated for each element of every tile, as no interval is known: {text(part)}" for part in found]


def judged(kernel: Kernel, arch: Arch, sizes: dict[str, int]) -> list[Verdict]:
    """A verdict on every candidate of the chip's family, those that fit first, by cost."""
    if arch.family == "sm90" and kernel.name in sm90_backward.KERNELS:
        every = sm90_backward.candidates(kernel, sizes)
        found = [sm90_backward.judge(kernel, arch, sizes, candidate) for candidate in every]
    elif arch.family == "sm90":
        found = [sm90.judge(kernel, arch, sizes, candidate) for candidate in sm90.candidates(kernel, sizes)]
    else:
        found = [judge(kernel, arch, sizes, candidate) for candidate in candidates(kernel, arch, sizes)]
    return sorted(found, key=lambda verdict: (bool(verdict.rejection), verdict.cost, str(verdict.candidate)))


def _choose(verdicts: list[Verdict], measured: tuned.Measured | None) -> tuple[Candidate, str]:
    """The measured candidate where it fits, else the best by cost; and what chose it."""
    if measured is None:
        return verdicts[0].candidate, "cost model"
    for verdict in verdicts:
        if measured.matches(verdict.candidate) and not verdict.rejection:
            return verdict.candidate, f"measurement: {measured.note}"
    return verdicts[0].candidate, "cost model; the measured choice does not fit"


def plan_like(kernel: Kernel, spec: Spec, arch: Arch, leader: Plan) -> Plan:
    """The plan of a kernel without a loop that shares its blocks of queries, and its dQ layout, with the backward."""
    block_q = leader.sizes["block_q"]
    shares_fragments = kernel.name == "attention_convert_dq"
    pieces = block_q // arch.mma[0]
    warps = leader.computing_warps if shares_fragments else max(n for n in range(1, 9) if pieces % n == 0)
    layouts = {
        item.name: leader.layouts["dq_acc"] if shares_fragments else (warps, 1)
        for item in kernel.buffers
        if item.space is Space.REGISTER and len(item.shape) == 2
    }
    traits = tuple(trait for trait in leader.candidate.traits if shares_fragments and trait == TRANSPOSED)
    candidate = Candidate((("block_q", block_q),), warps, (), tuple(layouts.items()), traits)
    made = make(kernel, spec, arch, candidate, {name: leader.sizes[name] for name in ("head_dim", "head_dim_v")})
    return replace(made, source=f"the blocks of {leader.kernel}")


def plan_sums(kernel: Kernel, spec: Spec, arch: Arch) -> Plan:
    """The plan of a kernel that only adds up what it loads: one tile for all."""
    warps, rows, cols = SUMS
    layouts = tuple((name, (warps, 1)) for name in tile_names(kernel))
    candidate = Candidate((("block_q", rows), ("block_kv", cols)), warps, (), layouts)
    return replace(make(kernel, spec, arch, candidate), min_blocks=1, source="the shape that all of its kind have")


def head_dims(spec: Spec, arch: Arch, kernel: str = "") -> dict[str, int]:
    """Head dims padded to whole matrix instructions (in depth and in pairs of columns).

    Where one of them is wide, to twice that: accumulators then only fit when two warps divide the columns.
    """
    unit = max(arch.mma[2], 2 * arch.mma[1])
    if arch.family == "sm90" and kernel in sm90_backward.KERNELS:
        return sm90_backward.head_dims(spec.head_dim, spec.head_dim_v)
    if max(spec.head_dim, spec.head_dim_v) > 8 * unit:
        unit *= 2

    def padded(size: int) -> int:
        return -(-size // unit) * unit

    width = padded(spec.head_dim_v)
    if width > wide.MOST_COLUMNS:
        width = wide.padded(width, arch.family)
    depth = padded(spec.head_dim)
    return {"head_dim": max(depth, width) if spec.shared_kv else depth, "head_dim_v": width}


def judge(kernel: Kernel, arch: Arch, sizes: dict[str, int], candidate: Candidate) -> Verdict:
    """Reject a candidate with a sentence, or give its cost."""
    sizes = sizes | dict(candidate.blocks)
    layouts, threads = dict(candidate.layouts), 32 * candidate.warps
    shape = _unfit_shape(kernel, arch, sizes, layouts)
    if shape:
        return Verdict(candidate, rejection=shape, unfit=True)
    needed = max(
        (p.end for p in smem.allocate(through_shared(kernel, layouts), sizes, dict(candidate.stages))), default=0
    )
    if needed > arch.shared_per_block:
        excess = f"{needed / KIB:.1f} KiB of shared memory exceed the {arch.shared_per_block / KIB:g} KiB of a block"
        return Verdict(candidate, rejection=excess)
    registers = cost.registers(kernel, sizes, threads, layouts)
    limit = min(arch.max_registers, arch.registers // threads)
    if registers > limit:
        sentence = f"about {registers} registers a thread exceed {limit}: it would spill"
        return Verdict(candidate, rejection=sentence, excess=registers - limit)
    blocks = cost.resident_blocks(arch, threads, registers, needed)
    work = cost.step(kernel, arch, sizes, layouts, candidate.warps)
    waited = sum(count == 1 for _, count in candidate.stages) / max(len(candidate.stages), 1)
    clocks = work.clocks(blocks, candidate.warps, waited) * 1e6 / max(work.flops, 1)
    why = (
        f"{needed / KIB:.1f} KiB, {registers} registers, {blocks} block{'s' * (blocks != 1)}; "
        f"a step takes {work.matrix:.0f} clocks of "
        f"matrix work, {work.shared:.0f} of shared memory, {work.special:.0f} of exponentials"
    )
    return Verdict(candidate, cost=clocks, why=why)


def _unfit_shape(kernel: Kernel, arch: Arch, sizes: dict[str, int], layouts: dict[str, tuple[int, int]]) -> str:
    """Why the tiles do not divide into the warps' matrix instructions, or an empty string."""
    m, n, _ = arch.mma
    for name, (along_rows, along_cols) in layouts.items():
        rows, cols = (sizes[dim] for dim in kernel.buffer(name).shape)
        if along_rows == 0 or rows % (m * along_rows) or cols % (2 * n * along_cols):
            return f"{name} of {rows} x {cols} does not divide among the warps into {m} x {2 * n} pieces"
    return ""


def make(kernel: Kernel, spec: Spec, arch: Arch, candidate: Candidate, padded: dict[str, int] | None = None) -> Plan:
    """The plan that a candidate stands for; `padded` head dims where those of another kernel count."""
    sizes = (padded or head_dims(spec, arch, kernel.name)) | dict(candidate.blocks)
    dims = {dim for item in kernel.buffers if item.space is not Space.GLOBAL for dim in item.shape}
    named = tuple((name, sizes[name]) for name in ("block_q", "block_kv", "head_dim", "head_dim_v") if name in dims)
    if arch.family == "sm90":
        part = sm90_backward if kernel.name in sm90_backward.KERNELS else sm90
        return part.make(kernel, arch, named, sizes, candidate)
    layouts, threads = dict(candidate.layouts), 32 * candidate.warps
    shared = smem.allocate(through_shared(kernel, layouts), sizes, dict(candidate.stages))
    registers = cost.registers(kernel, sizes, threads, layouts)
    needed = max((place.end for place in shared), default=0)
    return Plan(
        kernel=kernel.name,
        arch=arch,
        dims=named,
        candidate=candidate,
        shared=shared,
        registers=registers,
        min_blocks=max(1, cost.resident_blocks(arch, threads, registers, needed)),
        vector_bytes=16 if spec.aligned else spec.dtype.bytes,
        unrolled_depth=unrolled_depth(kernel, sizes, layouts),
    )


def unrolled_depth(kernel: Kernel, sizes: dict[str, int], layouts: dict[str, tuple[int, int]]) -> int:
    """Steps of depth that a product from shared memory unrolls: four, fewer where the registers would not do.

    Compiled by NVRTC 13.5 for every chip, the backward spills 4 to 150 bytes with four unless its rows are a power of
    two up to 128 wide (others copy in more passes, each with addresses of its own). Two are 0 to 7 % slower than four
    on an H200, one 2 to 12 %; a wide backward that splits its scores among four warps spills with two.
    float32 has more instructions in a step, and up to 12 bytes were spilled with more than these.
    """
    if any(item.dtype in (FP32, TF32) for item in kernel.buffers):
        return 4 if kernel.name == "attention_forward" and max(sizes["head_dim"], sizes["head_dim_v"]) <= 128 else 1
    wide = max(sizes["head_dim"], sizes["head_dim_v"]) if kernel.name == "attention_backward" else 0
    if wide > 128 and layouts["s"] == (2, 2):
        return 1
    found = 4 if wide in (0, 16, 32, 64, 128) else 2
    if not any(item.name == PADDING for item in kernel.scalars):
        return found
    # Where the sequences lie takes registers too; compiled by NVRTC 13.5, up to 32 bytes were spilled.
    if kernel.name == "attention_backward_dq":
        return 1 if max(sizes["head_dim"], sizes["head_dim_v"]) > 128 else 2
    return found if found == 4 else 1


def _beyond(verdict: Verdict) -> tuple[int, str]:
    return verdict.excess, str(verdict.candidate)


def _size(verdict: Verdict) -> tuple[bool, int, int, str]:
    """Orders by what is taken of the chip: by blocks, then by stages."""
    candidate = verdict.candidate
    blocks = math.prod(size for _, size in candidate.blocks)
    return verdict.unfit, blocks, sum(candidate.depths), str(candidate)
