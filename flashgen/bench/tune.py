"""Times the planner's candidates in the cells of the grid: is its choice the best, and if not, which line mends it?

All candidates of a kernel are compiled, checked against torch's attention and glanced at; those within 10 percent of
the fastest, and the planner's choice, are then timed in shuffled rounds. What is timed is a whole direction. A
backward takes the candidates of its main kernel, and where dQ has a kernel with candidates of its own (head dims over
128 on sm_90a) those of that one next, each time with the other kernel at the planner's present choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import flashgen
from flashgen.bench import candidates, grid, regret, report
from flashgen.bench.candidates import CandidatePeer, Problem
from flashgen.bench.grid import Cell
from flashgen.bench.run import BenchError, grid_options, make_console, require_gpu
from flashgen.bench.variants import OF_ONE_LENGTH
from flashgen.kernel import current_arch
from flashgen.plan.arch import Arch, parse_arch
from flashgen.runtime.compile import nvrtc_version

MARGIN = 0.10  # how far behind the fastest glance a candidate is still worth rounds
SAME = ("card", "arch", "nvrtc", "flashgen")  # what all cells of a file have in common


class Tuner:
    """One run: which card and chip, how careful, until when, and the file with what has been measured.

    The file: {"about": {"card", "capability", "arch", "nvrtc", "flashgen", ...}, "broken": {"kernels candidate":
    reason}, "cells": [{"kernel", "kernels", "date", "rounds", "top", "direction", "head_dim", "causal", "seqlen",
    "variant" where there is one, "batch", "heads", "flops", "results": {candidate: record}}]}, where "kernels" is a
    hash of the texts of all that was timed together. A record has "cost", "registers", "spills" and either "failed",
    "skipped" or what `measure.Competitor.record` gives.
    """

    def __init__(self, rounds: int, arch: Arch, output: Path, top: int | None, limit: float, console: Console) -> None:
        from flashgen.bench import measure

        self.deadline = time.monotonic() + limit
        self.arch, self.output, self.top, self.console = arch, output, top, console
        self.results = opened(output, about(arch))
        self.left_out: list[str] = []
        clock = measure.CudaClock()
        self.heater = measure.Heater(clock, "cuda")
        self.harness = measure.Harness(clock, self.heater, "cuda", rounds)

    def run(self, cells: Sequence[Cell]) -> None:
        """Times what the file does not have yet, until the time is over."""
        self.console.print(f"cuBLAS 8192-cubed bf16: {self.heater.settle()[1]:.0f} TFLOP/s warm", highlight=False)
        kinds: dict[tuple, list[Cell]] = {}
        for cell in cells:
            kinds.setdefault((cell.direction, cell.head_dim, cell.causal, cell.variant), []).append(cell)
        for (direction, head_dim, causal, variant), wanted in kinds.items():
            for problem in candidates.problems(direction, head_dim, causal, self.arch, variant):
                self._time_all(problem, wanted)
        if self.left_out:
            text = f"Out of time; left out: {', '.join(self.left_out)}. The same command continues."
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _time_all(self, problem: Problem, cells: Sequence[Cell]) -> None:
        """The cells of one kernel, head_dim, mask and variant."""
        peers = candidates.entrants(problem, self.arch, self.top)
        kernels = candidates.digest(peers)
        missing = [cell for cell in cells if not self._has(problem, cell, kernels)]
        for number, cell in enumerate(missing):
            if time.monotonic() >= self.deadline:
                self.left_out += [f"{problem.kernel} {cell}" for cell in missing[number:]]
                return
            if not number:
                self._compile(problem, peers, kernels)
            self._time(problem, cell, peers, kernels)

    def _has(self, problem: Problem, cell: Cell, kernels: str) -> bool:
        """Whether the file has a cell, measured with these kernels."""
        return any(self._same(entry, problem, cell) and entry["kernels"] == kernels for entry in self.results["cells"])

    @staticmethod
    def _same(entry: dict[str, Any], problem: Problem, cell: Cell) -> bool:
        place = (entry["kernel"], entry["head_dim"], entry["causal"], entry.get("variant", ""), entry["seqlen"])
        return place == (problem.kernel, cell.head_dim, cell.causal, cell.variant, cell.seqlen)

    def _compile(self, problem: Problem, peers: Sequence[CandidatePeer], kernels: str) -> None:
        """Compiles what has not broken an earlier run."""
        begin = time.monotonic()
        for peer in peers:
            peer.failure = self.results["broken"].get(f"{kernels} {peer.name}", "")
        candidates.compile_all(peer for peer in peers if not peer.failure)
        refused = sum(bool(peer.failure) for peer in peers)
        text = f"{problem.kernel} {problem.spec}: {len(peers)} candidates, {refused} of them not to be timed"
        self.console.print(f"{text}; compiled in {time.monotonic() - begin:.0f} s", markup=False, highlight=False)

    def _time(self, problem: Problem, cell: Cell, peers: Sequence[CandidatePeer], kernels: str) -> None:
        """Times one cell and writes the file."""
        from flashgen.bench.measure import ContextLost

        try:
            entry = self.harness.measure(cell, peers, MARGIN, [str(problem.at(cell.seqlen).plan().candidate)])
        except ContextLost as lost:
            self.results["broken"][f"{kernels} {lost.peer}"] = str(lost)
            report.save(self.results, self.output)
            raise BenchError(f"{lost}; run again, {self.output} has noted it and leaves it out") from None
        for peer in peers:
            entry["results"][peer.name] |= peer.facts()
        entry |= {"kernel": problem.kernel, "kernels": kernels, "date": date.today().isoformat()}
        entry |= {"rounds": self.harness.rounds, "top": self.top}
        self.results["cells"] = [e for e in self.results["cells"] if not self._same(e, problem, cell)] + [entry]
        report.save(self.results, self.output)
        self.console.print(regret.line(entry, problem), markup=False, highlight=False, soft_wrap=True)


def about(arch: Arch) -> dict[str, Any]:
    """The card and the software."""
    from flashgen.bench.measure import environment

    return environment() | {"arch": arch.name, "nvrtc": nvrtc_version(), "flashgen": flashgen.__version__}


def opened(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """What a file has, or the beginning of one. Raises BenchError where it comes from another card or version."""
    if not path.exists():
        return {"about": here, "broken": {}, "cells": []}
    found = report.load(path)
    differing = [name for name in SAME if found["about"].get(name) != here[name]]
    if differing:
        name = differing[0]
        raise BenchError(f"{path} is of {name} {found['about'].get(name)}, not {here[name]}; give another --output")
    return found


@click.command("tune")
@grid_options
@click.option("--variant", type=click.Choice(OF_ONE_LENGTH), multiple=True, help="Time these instead. Repeatable.")
@click.option("--top", type=click.IntRange(1), help="Only the best candidates by the model.  [default: all that fit]")
@click.option("--rounds", type=click.IntRange(3), default=5, show_default=True, help="Rounds; the median counts.")
@click.option("--limit", type=float, metavar="SECONDS", help="Begin no cell after so long.  [default: none]")
@click.option("--arch", help="Such as sm_90.  [default: the GPU's own]")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="tune.json",
    show_default=True,
    help="Written after each cell; cells that it has are not timed again.",
)
@click.option(
    "--report", "old", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Only show this file; no GPU."
)
def command(
    preset: str,
    direction: tuple[str, ...],
    variant: tuple[str, ...],
    head_dim: tuple[int, ...],
    seqlen: tuple[int, ...],
    causal: bool | None,
    top: int | None,
    rounds: int,
    limit: float | None,
    arch: str | None,
    output: Path,
    old: Path | None,
) -> None:
    """Time the planner's candidates on this GPU; show how far its choices are behind the best.

    Where a choice is more than 3 percent behind, the end shows a line for flashgen/plan/tuned.py. Where the time for a
    run is limited, --limit ends it between two cells; the same --output continues. A line for a variant is for all
    functions of its kind: one for --variant window is taken for a window of any size.

    \b
    python -m flashgen tune --preset full --direction fwd --limit 540 --output fwd.json
    python -m flashgen tune --direction bwd --head-dim 128 --causal --seqlen 4096 --top 4
    python -m flashgen tune --direction fwd --variant window --variant alibi --seqlen 4096 --output variants.json
    python -m flashgen tune --report fwd.json
    """
    console = make_console(220)
    if old is not None:
        regret.show(report.load(old), console)
        return
    require_gpu()
    masks = None if causal is None else (causal,)
    cells = grid.cells(preset, direction or grid.DIRECTIONS, head_dim or None, masks, seqlen or None, variant)
    chip = current_arch() if arch is None else parse_arch(arch)
    tuner = Tuner(rounds, chip, output, top, float("inf") if limit is None else limit, console)
    tuner.run(cells)
    regret.show(tuner.results, console)
