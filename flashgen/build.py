"""The pipeline as one straight line: from a spec to the CUDA of each of its kernels. Nothing is compiled here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from flashgen import debug, lower
from flashgen.attention import backward as backward_nests
from flashgen.attention import backward_aux as backward_aux_nest
from flashgen.attention import forward as forward_nest
from flashgen.emit.cuda import cuda
from flashgen.emit.source import Source
from flashgen.ir.nodes import Kernel
from flashgen.ir.printer import kernel_text
from flashgen.plan import packing, planner, sm90_backward
from flashgen.plan.arch import TOY, Arch, check_real, portable_record
from flashgen.plan.plan import Plan
from flashgen.spec import Spec

log = logging.getLogger("flashgen")


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


def arch_for(kernel: str, spec: Spec, arch: Arch) -> Arch:
    """The record to plan a kernel for: the portable one where the chip's family lacks it, or cannot copy the rows."""
    has = kernel in ("attention_forward", *sm90_backward.KERNELS)
    own = arch.family == "sm80" or (has and spec.aligned)
    return arch if own else portable_record(arch)


def forward(spec: Spec, arch: Arch) -> tuple[Stages, ...]:
    """The forward's one kernel; heads are packed where the chip's own family has it."""
    own = _forward_arch(spec, arch)
    return (_forward(spec.forward() if own.family == "sm90" else replace(spec.forward(), packed=1), own),)


def heads_to_pack(spec: Spec, arch: Arch, seqlen_q: int, group: int) -> int:
    """How many heads of a group the forward should pack into a tile, for so many queries."""
    own = _forward_arch(spec, arch)
    if own.family != "sm90":
        return 1

    def block_q(packed: int) -> int:
        return _forward_plan(replace(spec.forward(), packed=packed), own).sizes["block_q"]

    return packing.heads_to_pack(seqlen_q, group, block_q)


@cache
def _forward_arch(spec: Spec, arch: Arch) -> Arch:
    """The record to plan the forward for: the portable one where what functions load leaves no tile room."""
    own = arch_for("attention_forward", spec, arch)
    if spec.arrays and own.portable:
        try:
            _forward_plan(spec.forward(), own)
        except planner.PlanError as error:
            log.info("%s: %s", spec, error)
            return portable_record(own)
    return own


@cache
def _forward_plan(spec: Spec, arch: Arch) -> Plan:
    return planner.plan(forward_nest.forward(spec), spec, arch)


@cache
def _forward(spec: Spec, arch: Arch) -> Stages:
    return forward_with(spec, _forward_plan(spec, arch))


def forward_with(spec: Spec, plan: Plan) -> Stages:
    """The forward with a given plan."""
    return _finish(forward_nest.forward(spec), plan, spec)


@cache
def backward(spec: Spec, arch: Arch) -> tuple[Stages, ...]:
    """The backward's kernels in the order of their launches: delta, dK and dV (with dQ), then what makes dq.

    None of them packs heads. The derivative of a score function may take a tile too many, or what functions load from
    arrays: then dQ has its own kernel; where no tile fits even so, the portable kernels are taken.
    """
    arch = arch_for("attention_backward", spec, arch)
    ways = [(spec, arch)]
    if (spec.score is not None or spec.arrays) and arch.portable:
        ways += [(replace(spec, deterministic=True), arch), (spec, portable_record(arch))]
    for way, chip in ways[:-1]:
        try:
            return _backward(way, chip)
        except planner.PlanError as error:
            log.info("%s: %s", spec, error)
    return _backward(*ways[-1])


def _backward(spec: Spec, arch: Arch) -> tuple[Stages, ...]:
    nest = backward_nests.backward(backward_spec(spec, arch))
    return backward_with(spec, planner.plan(nest, spec, arch))


def backward_spec(spec: Spec, arch: Arch) -> Spec:
    """What the backward of a spec is made for: no packed heads; deterministic where dQ has its own kernel."""
    apart = arch.family == "sm90" and sm90_backward.dq_apart(spec.head_dim, spec.head_dim_v)
    return replace(spec, packed=1, deterministic=spec.deterministic or apart)


def backward_with(spec: Spec, main: Plan, dq: Plan | None = None) -> tuple[Stages, ...]:
    """The backward with a given plan for its main kernel; the others follow its blocks.

    dq: for the kernel of dQ alone, where there is one; the planner's choice where None.
    """
    arch = main.arch
    spec = backward_spec(spec, arch)
    nest = backward_nests.backward(spec)
    portable = portable_record(arch) if arch.portable else arch  # what only copies needs no instruction of its own

    def follow(make: Callable[[Spec], Kernel]) -> Stages:
        kernel = make(spec)
        return _finish(kernel, planner.plan_like(kernel, spec, portable, main), spec)

    if spec.deterministic:
        dq_nest = backward_nests.backward_dq(spec)
        last = _finish(dq_nest, dq or planner.plan(dq_nest, spec, arch), spec)
    else:
        last = follow(backward_nests.convert_dq)
    return follow(backward_nests.delta), _finish(nest, main, spec), last


@cache
def backward_aux(spec: Spec, arch: Arch, part: backward_aux_nest.Part) -> Stages:
    """The kernel of one part of the gradient of an array; every chip runs the portable one."""
    spec = replace(spec, packed=1, deterministic=False)
    nest = backward_aux_nest.backward_aux(spec, part)
    return _finish(nest, planner.plan(nest, spec, portable_record(arch) if arch.portable else arch), spec)


def everything(spec: Spec, arch: Arch) -> dict[str, Stages]:
    """All kernels of a spec by name, in the order of their launches."""
    return {stages.tile.name: stages for stages in (*forward(spec, arch), *backward(spec, arch))}


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
