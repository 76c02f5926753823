"""The pipeline as one straight line: from a spec to the CUDA of each of its kernels. Nothing is compiled here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from flashgen import debug, lower
from flashgen.attention import backward as backward_nests
from flashgen.attention import backward_aux as backward_aux_nest
from flashgen.attention import blocks as blocks_nest
from flashgen.attention import forward as forward_nest
from flashgen.attention import reads as reads_nest
from flashgen.attention import sinks as sink_nests
from flashgen.attention import tiles
from flashgen.emit.cuda import cuda
from flashgen.emit.source import Source
from flashgen.ir.nodes import Kernel
from flashgen.ir.printer import kernel_text
from flashgen.plan import blocks as blocks_plan
from flashgen.plan import packing, planner, sm90_backward, tuned
from flashgen.plan.arch import TOY, Arch, check_real, portable_record
from flashgen.plan.plan import Plan
from flashgen.spec import Array, Spec

log = logging.getLogger("flashgen")
# Up to so many, the rows of a warpgroup, heads share a tile though what is added to scores is then read by element.
FEW_QUERIES = 64


@dataclass(frozen=True)
class Stages:
    """Every stage of one kernel. `emitted` is None for the made-up chip."""

    tile: Kernel
    plan: Plan
    machine: Kernel
    emitted: Source | None

    @property
    def tile_text(self) -> str:
        """The TILE kernel as text."""
        return kernel_text(self.tile)

    @property
    def machine_text(self) -> str:
        """The MACHINE kernel as text."""
        return kernel_text(self.machine)

    @property
    def source(self) -> Source:
        """The CUDA. Raises ValueError for the made-up chip, which has none."""
        check_real(self.plan.arch)
        assert self.emitted is not None
        return self.emitted


def _portable(arch: Arch) -> Arch:
    """The record of a chip for kernels that every chip has in one form."""
    return portable_record(arch) if arch.portable else arch


def arch_for(kernel: str, spec: Spec, arch: Arch) -> Arch:
    """The record to plan a kernel for: the portable one where the chip's family lacks it, or cannot copy the rows."""
    has = kernel in ("attention_forward", *sm90_backward.KERNELS) and spec.dtype.bytes == 2
    own = arch.family == "sm80" or (has and spec.aligned)
    return arch if own else portable_record(arch)


def forward(spec: Spec, arch: Arch) -> tuple[Stages, ...]:
    """The forward's one kernel; heads are packed where the chip's own family has it."""
    own = forward_arch(spec, arch)
    planned = spec.forward() if own.family == "sm90" else replace(spec.forward(), packed=1, length="", tiled=False)
    return (_forward(with_room(planned, own), own),)


def heads_to_pack(spec: Spec, arch: Arch, seqlen_q: int, group: int) -> int:
    """How many heads of a group the forward should pack into a tile, for so many queries."""
    own = forward_arch(spec, arch)
    if own.family != "sm90" or spec.dropout:  # whose random numbers are made for whole tiles of one head
        return 1
    if seqlen_q > FEW_QUERIES and with_room(spec.forward(), own).tiled:
        return 1

    def block_q(packed: int) -> int:
        try:
            return _forward_plan(with_room(replace(spec.forward(), packed=packed), own), own).sizes["block_q"]
        except planner.PlanError:  # of functions that load for rows of several heads
            return 0

    return packing.heads_to_pack(seqlen_q, group, block_q)


def for_sizes(spec: Spec, arch: Arch, seqlen_q: int, seqlen_k: int, group: int) -> Spec:
    """The spec of the forward that suits a call: as many heads in a tile as there is room for, else its length.

    group: query heads of one key head.
    """
    packed = heads_to_pack(spec, arch, seqlen_q, group)
    if packed > 1:
        return replace(spec, packed=packed)
    return replace(spec, length=tuned.length("attention_forward", spec, forward_arch(spec, arch), seqlen_k))


def backward_for_sizes(spec: Spec, arch: Arch, seqlen_k: int) -> Spec:
    """The spec of the backward that suits a call: its length."""
    chip = arch_for("attention_backward", spec, arch)
    return replace(spec, length=tuned.length("attention_backward", spec, chip, seqlen_k))


@cache
def forward_arch(spec: Spec, arch: Arch) -> Arch:
    """The record to plan the forward for: the portable one where functions, or random numbers, leave no tile room."""
    own = arch_for("attention_forward", spec, arch)
    if spec.dtype.bytes == 4 and own.family != arch.family:
        log.info("%s: float32 is multiplied by mma.sync; the %s kernels run", spec, own.name)
    if (spec.mask or spec.score or spec.dropout) and own.portable:
        try:
            _forward_plan(with_room(spec.forward(), own), own)
        except planner.PlanError as error:
            log.info("%s: %s", spec, error)
            return portable_record(own)
    return own


@cache
def with_room(spec: Spec, arch: Arch) -> Spec:
    """The spec of a forward; without tiles of what its score function reads where there is no room for them."""
    if not (spec.tiled and tiles.of(spec)):
        return replace(spec, tiled=False)
    try:
        _forward_plan(spec, arch)
    except planner.PlanError as error:
        log.info("%s: %s; its arrays are read element by element", spec, error)
        return replace(spec, tiled=False)
    return spec


@cache
def _forward_plan(spec: Spec, arch: Arch) -> Plan:
    may_spill = bool(spec.mask or spec.score) or spec.dtype.bytes == 4
    return planner.plan(forward_nest.forward(spec), spec, arch, may_spill=may_spill and not arch.portable)


@cache
def _forward(spec: Spec, arch: Arch) -> Stages:
    return forward_with(spec, _forward_plan(spec, arch))


def forward_with(spec: Spec, plan: Plan) -> Stages:
    """The forward with a given plan."""
    return _finish(forward_nest.forward(spec), plan, spec)


@cache
def backward(spec: Spec, arch: Arch) -> tuple[Stages, ...]:
    """The backward's kernels in the order of their launches: delta, dK and dV (with dQ), what makes dq, and dsinks.

    None of them packs heads.
    """
    return backward_with(*backward_plans(spec, arch))


def backward_plans(spec: Spec, arch: Arch) -> tuple[Spec, Plan, Plan | None]:
    """What the backward is made for, the plan of its main kernel, and that of dQ's kernel where there is one.

    The derivative of a score function may take a tile too many, float32, what functions load, or random numbers:
    then dQ has its own kernel; where no tile fits even so, the portable kernels are taken, and of these in the end
    those that are estimated to spill least: no function is refused.
    """
    spec.check_differentiable()
    arch = arch_for("attention_backward", spec, arch)
    ways = [(spec, arch)]
    takes_more = spec.score is not None or spec.mask is not None or spec.dropout or spec.dtype.bytes == 4
    if takes_more:
        apart = replace(spec, deterministic=True)
        ways += [(apart, arch)]
        if backward_spec(spec, arch).tiled:  # else the same once more
            spec, apart = (replace(way, tiled=False) for way in (spec, apart))
            ways += [(spec, arch), (apart, arch)]
        ways += [(way, portable_record(arch)) for way in (spec, apart) if arch.portable]
    for way, chip in ways[:-1]:
        try:
            return _backward_plans(way, chip)
        except planner.PlanError as error:
            log.info("%s: %s", spec, error)
    return _backward_plans(*ways[-1], may_spill=takes_more)


def _backward_plans(spec: Spec, arch: Arch, may_spill: bool = False) -> tuple[Spec, Plan, Plan | None]:
    own = backward_spec(spec, arch)
    spec = replace(spec, tiled=own.tiled, length=own.length)
    main = planner.plan(backward_nests.backward(own), spec, arch, may_spill)
    dq = planner.plan(backward_nests.backward_dq(own), own, arch, may_spill) if own.deterministic else None
    return own, main, dq


def backward_spec(spec: Spec, arch: Arch) -> Spec:
    """What the backward of a spec is made for: one head in a tile; deterministic where dQ is made apart.

    For any length where none was measured.
    """
    apart = arch.family == "sm90" and sm90_backward.dq_apart(spec.head_dim, spec.head_dim_v)
    spec = replace(spec, packed=1, length=spec.length if tuned.has_length("attention_backward", spec, arch) else "")
    tiled = arch.family == "sm90" and tiles.in_backward(spec)
    return replace(spec, tiled=tiled, deterministic=spec.deterministic or apart)


def backward_with(spec: Spec, main: Plan, dq: Plan | None = None) -> tuple[Stages, ...]:
    """The backward with a given plan for its main kernel; the others follow its blocks.

    dq: for the kernel of dQ alone, where there is one; the planner's choice where None.
    """
    arch = main.arch
    spec = backward_spec(spec, arch)
    nest = backward_nests.backward(spec)
    portable = _portable(arch)  # what only copies needs no instruction of its own

    def follow(make: Callable[[Spec], Kernel]) -> Stages:
        kernel = make(spec)
        return _finish(kernel, planner.plan_like(kernel, spec, portable, main), spec)

    if spec.deterministic:
        dq_nest = backward_nests.backward_dq(spec)
        last = _finish(dq_nest, dq or planner.plan(dq_nest, spec, arch), spec)
    else:
        last = follow(backward_nests.convert_dq)
    return follow(backward_nests.delta), _finish(nest, main, spec), last, *_of_sinks(spec, portable)


def _of_sinks(spec: Spec, arch: Arch) -> Iterator[Stages]:
    """The kernels of the gradient of the sinks, where the spec has them."""
    for make in (sink_nests.partial_sums, sink_nests.gradient) if spec.sinks else ():
        kernel = make(spec)
        yield _finish(kernel, planner.plan_sums(kernel, spec, arch), spec)


@cache
def block_counts(spec: Spec, arch: Arch, block_size: int) -> Stages:
    """The kernel that counts what the masks of a spec show of each block; no other part of the spec counts."""
    spec = Spec(causal=spec.causal, mask=spec.mask)
    kernel = blocks_nest.blocks(spec)
    portable = _portable(arch)
    return _finish(kernel, blocks_plan.plan(kernel.name, portable, block_size), spec)


@cache
def backward_aux(spec: Spec, arch: Arch, part: backward_aux_nest.Part) -> Stages:
    """The kernel of one part of the gradient of an array; every chip runs the portable one."""
    spec = replace(spec, packed=1, length="", deterministic=False, sinks=None, listed=False, tiled=False)
    nest = backward_aux_nest.backward_aux(spec, part)
    portable = _portable(arch)
    return _finish(nest, planner.plan(nest, spec, portable, may_spill=True), spec)


@cache
def reads(spec: Spec, array: Array, arch: Arch, block_size: int) -> Stages:
    """The kernel that counts the elements for which functions read outside of one of their arrays.

    Of a spec nothing counts but what is seen, and how long sequences are.
    """
    spec = Spec(causal=spec.causal, mask=spec.mask, score=spec.score, varlen=spec.varlen, used=spec.used)
    kernel = reads_nest.reads(spec, array)
    portable = _portable(arch)
    return _finish(kernel, blocks_plan.plan(kernel.name, portable, block_size), spec)


def everything(spec: Spec, arch: Arch) -> dict[str, Stages]:
    """All kernels of a spec by name, in the order of their launches; of wide heads there is the forward alone."""
    made = (*forward(spec, arch), *(backward(spec, arch) if spec.differentiable else ()))
    return {stages.tile.name: stages for stages in made}


def _finish(kernel: Kernel, plan: Plan, spec: Spec) -> Stages:
    """Lower and emit, showing each stage where asked."""
    watching = debug.watching()
    if watching:
        debug.show(3, "tile", kernel.name, kernel_text(kernel))
        debug.show(2, "plan", kernel.name, plan.explain())
    last = [kernel]

    def watch(name: str, after: Kernel) -> None:
        if watching and after != last[0]:
            debug.show(3, "ir", f"{kernel.name}-{name}", kernel_text(after))
        last[0] = after

    machine = lower.run(kernel, plan, watch)
    source = cuda(machine, plan, spec) if plan.arch.name != TOY.name else None
    if watching and source is not None:
        debug.show(4, "cu", kernel.name, source.text)
    return Stages(kernel, plan, machine, source)
