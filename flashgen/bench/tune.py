"""Times the planner's candidates beside the peers: what the cost model should have known, and lines for plan/tuned.py.

The figure of a planner is its regret: how much slower its choice is than the best candidate.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from flashgen import build
from flashgen.api import Kernel, current_arch, programs
from flashgen.attention import backward as backward_nests
from flashgen.attention import forward as forward_nest
from flashgen.bench.grid import Cell
from flashgen.bench.measure import CudaClock, Harness, Heater
from flashgen.bench.peers import Attend, Peer, choose
from flashgen.bench.run import require_gpu
from flashgen.plan import planner, tuned
from flashgen.plan.arch import Arch, parse_arch
from flashgen.plan.plan import Plan, Verdict
from flashgen.runtime.compile import compile_many
from flashgen.runtime.program import Program
from flashgen.spec import Spec


class _TunedKernel(Kernel):
    """A kernel object that launches given programs for one stage."""

    def __init__(self, spec: Spec, arch: Arch, stage: str, made: tuple[Program, ...]) -> None:
        super().__init__(spec, arch, "bshd", "cuda", False)
        self._stage, self._made = stage, made

    def programs(self, stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
        return self._made if stage == self._stage else programs(stage, spec, arch)


class CandidatePeer(Peer):
    """One candidate plan as a competitor."""

    def __init__(self, spec: Spec, direction: str, plan: Plan, verdict: Verdict) -> None:
        self.name = self.title = str(plan.candidate)
        self.spec, self.plan, self.verdict = spec, plan, verdict
        made = (build.forward_with(spec, plan),) if direction == "fwd" else build.backward_with(spec, plan)
        self.programs = tuple(Program(stages) for stages in made)
        self.main = self.programs[0 if direction == "fwd" else 1]
        stage = "forward" if direction == "fwd" else "backward"
        self.kernel = _TunedKernel(spec, plan.arch, stage, self.programs)

    def version(self) -> str:
        return "candidate"

    def available(self) -> str:
        return ""

    def bind(self, cell: Cell) -> Attend:
        return self.kernel


def candidates(spec: Spec, direction: str, arch: Arch, limit: int) -> list[CandidatePeer]:
    """The best candidates by the cost model, compiled."""
    nest = forward_nest.forward(spec) if direction == "fwd" else backward_nests.backward(spec)
    fitting = [verdict for verdict in planner.plan(nest, spec, arch).verdicts if not verdict.rejection][:limit]
    made = [CandidatePeer(spec, direction, planner.make(nest, spec, arch, item.candidate), item) for item in fitting]
    compile_many([(program.stages.source, arch.target) for peer in made for program in peer.programs])
    return made


def tune(cell: Cell, yardsticks: Iterable[Peer], harness: Harness, limit: int, arch: Arch) -> list[dict[str, Any]]:
    """Every candidate's median milliseconds in one cell, fastest first; yardsticks are among the rows.

    The fastest candidate's row has its line for plan/tuned.py.
    """
    spec = Spec(cell.head_dim, cell.head_dim, causal=cell.causal)
    made = candidates(spec, cell.direction, arch, limit)
    results = harness.measure(cell, [*yardsticks, *made])["results"]
    rows = []
    for name, record in results.items():
        peer = next((item for item in made if item.name == name), None)
        row: dict[str, Any] = {"name": name, "failure": record.get("failure", "") or record.get("skipped", "")}
        if record.get("rounds_ms"):
            milliseconds = statistics.median(record["rounds_ms"])
            row |= {"ms": milliseconds, "tflops": cell.flops / milliseconds / 1e9}
        if peer is not None:
            report = peer.main.cubin.report
            row |= {"cost": peer.verdict.cost, "registers": report.registers}
            row |= {"spills": report.spill_stores + report.spill_loads, "seconds": report.seconds}
        rows.append(row)
    rows.sort(key=lambda row: row.get("ms", 1e9))
    by_name = {peer.name: peer for peer in made}
    best = next((row for row in rows if row["name"] in by_name and "ms" in row and not row["failure"]), None)
    if best is not None:
        options = f"--limit {limit} --rounds {harness.rounds}"
        if arch != current_arch():
            options += f" --arch {arch.name}"
        best["line"] = table_line(cell, by_name[best["name"]], best["tflops"], options)
    return rows


def table_line(cell: Cell, peer: CandidatePeer, tflops: float, options: str) -> str:
    """The line of TABLE in plan/tuned.py that makes a candidate the choice."""
    figure = f"{torch.cuda.get_device_name()}, {date.today().isoformat()}, {tflops:.0f} TFLOP/s"
    problem = f"--direction {cell.direction} --head-dim {cell.head_dim} --{cell.mask} --seqlen {cell.seqlen}"
    command = f"python -m flashgen tune {problem} {options}"
    return tuned.line(peer.plan.kernel, peer.spec, peer.plan.arch, peer.plan.candidate, figure, command)


@click.command()
@click.option("--direction", type=click.Choice(["fwd", "bwd"]), multiple=True, default=("fwd", "bwd"))
@click.option("--head-dim", type=int, multiple=True, default=(64, 128))
@click.option("--seqlen", type=int, multiple=True, default=(4096,))
@click.option("--causal/--full", default=None, help="One mask; both where neither is given.")
@click.option("--limit", default=16, help="Candidates for each cell, the best by the cost model.")
@click.option("--rounds", default=5)
@click.option("--arch", default=None, help="Such as sm_90a; the GPU's default where not given.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="A JSON file for all rows.")
def command(
    direction: tuple[str, ...],
    head_dim: tuple[int, ...],
    seqlen: tuple[int, ...],
    causal: bool | None,
    limit: int,
    rounds: int,
    arch: str | None,
    out: Path | None,
) -> None:
    """Time the planner's candidates on this GPU beside FA2 and cuDNN; print the best as a line for plan/tuned.py."""
    require_gpu()
    clock = CudaClock()
    heater = Heater(clock, "cuda")
    print(f"{torch.cuda.get_device_name()}: cuBLAS {heater.settle()[1]:.0f} TFLOP/s", flush=True)
    harness = Harness(clock, heater, "cuda", rounds=rounds)
    yardsticks = choose(["fa2", "cudnn"])[0]
    chip = current_arch() if arch is None else parse_arch(arch)
    every = []
    masks = (False, True) if causal is None else (causal,)
    for cell in (Cell(d, h, c, s) for d in direction for h in head_dim for c in masks for s in seqlen):
        rows = tune(cell, yardsticks, harness, limit, chip)
        every.append({"cell": str(cell), "rows": rows})
        print(cell, flush=True)
        for row in rows:
            detail = " ".join(
                f"{key}={row[key]:.4g}" for key in ("tflops", "cost", "registers", "spills") if key in row
            )
            print(f"  {row['name']:60s} {detail} {row['failure']}", flush=True)
        for row in rows:
            if "line" in row:
                print(f"for TABLE in flashgen/plan/tuned.py:\n{row['line']}", flush=True)
        if out is not None:
            out.write_text(json.dumps(every, indent=1))
    print(f"cuBLAS {heater.rate():.0f} TFLOP/s at the end")


if __name__ == "__main__":
    command()
