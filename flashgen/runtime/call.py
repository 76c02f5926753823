"""What a kernel keeps of its calls, and what it reports of its programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashgen.runtime.arguments import Problem

if TYPE_CHECKING:
    from flashgen.plan.arch import Arch
    from flashgen.runtime.blocks import Request
    from flashgen.runtime.compile import Report
    from flashgen.runtime.program import Bound, Program
    from flashgen.spec import Spec


@dataclass
class Call:
    """One shape of call, ready: on the GPU with its launches, on the interpreter with none.

    copied: the backward's inputs that its kernels cannot read in place. lists: what is walked of a block mask.
    made: the spec and the chip that launches were made for. known: strides and scalars that they are bound to, by name.
    parts: launches for gradients of arrays, by part and shape, as they are asked for (runtime/aux_gradients.py).
    """

    problem: Problem
    scale: float
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    device: int
    backward: bool
    copied: tuple[str, ...] = ()
    launches: tuple[Bound, ...] | None = None
    workspaces: dict[str, tuple[int, ...]] = field(default_factory=dict)
    made: tuple[Spec, Arch] | None = None
    known: tuple[Mapping[str, Sequence[int]], Mapping[str, int | float]] = ({}, {})
    parts: dict[tuple, Bound] = field(default_factory=dict)
    lists: tuple[Request, ...] = ()


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says of a kernel, and its dynamic shared memory in bytes."""

    registers: int
    spills: int
    shared_memory: int
    compile_seconds: float
    cached: bool
    compiler: Report

    @classmethod
    def of(cls, program: Program) -> KernelReport:
        report = program.cubin.report
        spills = report.spill_stores + report.spill_loads
        shared = program.stages.plan.shared_bytes
        return cls(report.registers, spills, shared, report.seconds, report.cached, report)
