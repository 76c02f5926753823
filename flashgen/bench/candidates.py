"""The planner's candidates for one kernel, built and compiled, as competitors of the harness."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from flashgen import build
from flashgen.attention import backward as backward_nests
from flashgen.attention import forward as forward_nest
from flashgen.attention import tiles
from flashgen.bench.grid import Cell
from flashgen.bench.peers import Attend, Peer, device, first_line
from flashgen.bench.variants import functions, modification
from flashgen.ir.nodes import Kernel as Nest
from flashgen.kernel import Kernel
from flashgen.plan import planner, tuned
from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate, Plan, Verdict
from flashgen.runner import programs
from flashgen.runtime.program import Program
from flashgen.spec import LENGTHS, Spec

NESTS = {
    "attention_forward": forward_nest.forward,
    "attention_backward": backward_nests.backward,
    "attention_backward_dq": backward_nests.backward_dq,
}


@dataclass(frozen=True)
class Problem:
    """One kernel to choose a candidate for; `spec` and `arch` are those that it is planned with."""

    kernel: str
    spec: Spec
    arch: Arch

    @property
    def nest(self) -> Nest:
        """The loop nest."""
        return NESTS[self.kernel](self.spec)

    @property
    def direction(self) -> str:
        """Which of the harness's directions launches the kernel."""
        return "fwd" if self.kernel == "attention_forward" else "bwd"

    def at(self, seqlen_k: int) -> Problem:
        """The problem of calls with so many keys."""
        return self._of(tuned.length(self.kernel, self.spec, self.arch, seqlen_k))

    def _of(self, length: str) -> Problem:
        return replace(self, spec=replace(self.spec, length=length))

    def choices(self) -> list[Candidate]:
        """The planner's present choices for all lengths."""
        return list(dict.fromkeys(self._of(length).plan().candidate for length in LENGTHS))

    def plan(self) -> Plan:
        """The planner's present choice, with every candidate's verdict."""
        return planner.plan(self.nest, self.spec, self.arch, may_spill=bool(self.spec.mask or self.spec.score))

    def stages(self, candidate: Candidate) -> tuple[build.Stages, ...]:
        """The kernels of a direction with a candidate for this one; the others are the planner's choice."""
        plan = planner.make(self.nest, self.spec, self.arch, candidate)
        if self.kernel == "attention_forward":
            return (build.forward_with(self.spec, plan),)
        if self.kernel == "attention_backward":
            return build.backward_with(self.spec, plan)
        return build.backward_with(self.spec, replace(self, kernel="attention_backward").plan(), plan)


def problems(direction: str, head_dim: int, causal: bool, arch: Arch, variant: str = "") -> list[Problem]:
    """The kernels of a direction that have candidates: two in a backward that makes dQ apart.

    Of a variant those that a call launches, which may be of the portable family.
    """
    causal, mask, score = functions(variant, causal)
    spec = Spec(head_dim, head_dim, causal=causal, mask=mask, score=score)
    spec = replace(spec, tiled=arch.family == "sm90" and bool(tiles.fit(spec)))  # a variant's arrays lie as TMA asks
    if direction == "fwd":
        own = build.forward_arch(spec, arch)
        return [Problem("attention_forward", build.with_room(spec, own), own)]
    spec, main, _ = build.backward_plans(spec, arch)
    names = ("attention_backward", "attention_backward_dq") if spec.deterministic else ("attention_backward",)
    return [Problem(name, spec, main.arch) for name in names]


class CandidatePeer(Peer):
    """One candidate as a competitor. `failure` says why it cannot be timed, once it is known."""

    def __init__(self, problem: Problem, verdict: Verdict, chip: Arch) -> None:
        self.name = self.title = str(verdict.candidate)
        self.verdict, self.failure = verdict, ""
        self.programs = tuple(Program(stages) for stages in problem.stages(verdict.candidate))
        self.main = next(program for program in self.programs if program.name == problem.kernel)
        stage = "forward" if problem.direction == "fwd" else "backward"
        self.kernel = _GivenKernel(problem.spec, chip, stage, self.programs)

    def supports(self, cell: Cell) -> str:
        return self.failure

    def bind(self, cell: Cell) -> Attend:
        arrays = modification(cell, device()).arrays
        return lambda q, k, v: self.kernel(q, k, v, **arrays)

    def compile(self) -> None:
        """Compiles the kernels; a candidate that NVRTC refuses, or whose pipeline is lost, is not timed."""
        try:
            for program in self.programs:
                _ = program.cubin
        except RuntimeError as error:
            self.failure = first_line(error)

    def facts(self) -> dict[str, Any]:
        """What is known of it without a clock: its cost by the model, and what ptxas says of the kernel."""
        known = {"cost": self.verdict.cost}
        if not self.failure:
            said = self.main.cubin.report
            known |= {"registers": said.registers, "spills": said.spill_stores + said.spill_loads}
        return known


class _GivenKernel(Kernel):
    """A kernel object that launches given programs for one stage."""

    def __init__(self, spec: Spec, arch: Arch, stage: str, made: tuple[Program, ...]) -> None:
        super().__init__(spec, arch, "bshd", "cuda", pinned=True)
        self._stage, self._made = stage, made

    def programs(self, stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
        return self._made if stage == self._stage else programs(stage, spec, arch)


def entrants(problem: Problem, chip: Arch, top: int | None) -> list[CandidatePeer]:
    """The best candidates by the cost model, or all that fit, and the present choices in any case; not yet compiled."""
    choices = problem.choices()
    verdicts = problem.plan().verdicts
    best = [verdict for verdict in verdicts if not verdict.rejection][:top]
    chosen = [verdict for verdict in verdicts if verdict.candidate in choices and verdict not in best]
    return [CandidatePeer(problem, verdict, chip) for verdict in [*best, *chosen]]


def compile_all(peers: Iterable[CandidatePeer]) -> None:
    """Compiles in one thread a core: NVRTC releases the GIL."""
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="flashgen-tune") as pool:
        list(pool.map(CandidatePeer.compile, peers))


def digest(peers: Iterable[CandidatePeer]) -> str:
    """What tells measurements of the same kernels: a hash of all their texts."""
    texts = hashlib.sha256()
    for program in (program for peer in peers for program in peer.programs):
        source = program.stages.source
        texts.update(repr((source.name, source.text, source.headers)).encode())
    return texts.hexdigest()[:16]
