"""What the tuner's file says: how far each choice is from the best, and lines for plan/tuned.py. Needs no GPU.

The regret of a candidate in a cell is how much longer it takes than the fastest. A kernel's choice is the planner's of
today, so that a file shows at once what a new line changes. A candidate that was only glanced at is compared with the
fastest glance. What spills is no candidate for anything: `make generate` refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import Console
from rich.table import Table

from flashgen.bench.candidates import Problem, problems
from flashgen.bench.grid import PRESETS, mask_name
from flashgen.plan import tuned
from flashgen.plan.arch import for_capability, parse_arch
from flashgen.plan.plan import Plan

WITHIN = 0.03  # of the best: what a choice must be
Results = dict[str, Any]  # see `tune.run`
Cell = dict[str, Any]


def fastest(cell: Cell) -> str | None:
    """The candidate with the least time of all that went through the rounds; None where none did."""
    timed = {name: record["ms"] for name, record in _sound(cell).items() if "ms" in record}
    return min(timed, key=lambda name: timed[name], default=None)


def regret(cell: Cell, name: str) -> float | None:
    """By how much a candidate is slower than the fastest: 0.01 is 1 percent. None where it has no time."""
    record = cell["results"].get(name, {})
    unit = "ms" if "ms" in record else "glance_ms"
    others = [other[unit] for other in _sound(cell).values() if unit in other]
    return record[unit] / min(others) - 1 if unit in record and others else None


def _sound(cell: Cell) -> dict[str, dict[str, Any]]:
    return {name: record for name, record in cell["results"].items() if not record.get("spills")}


@dataclass
class Group:
    """The cells of one kernel, head_dim, mask and variant that share a line in plan/tuned.py, by length."""

    about: dict[str, Any]
    problem: Problem
    cells: list[Cell]

    def __str__(self) -> str:
        return f"{self.problem.kernel} {self.problem.spec}"

    @cached_property
    def plan(self) -> Plan:
        """The planner's choice of today."""
        return self.problem.plan()

    @property
    def choice(self) -> str:
        return str(self.plan.candidate)

    def worst(self, name: str) -> tuple[float, int]:
        """A candidate's largest regret and where it is; infinite where a cell has no time of it."""
        found = [(regret(cell, name), cell["seqlen"]) for cell in self.cells]
        return max((math.inf if value is None else value, seqlen) for value, seqlen in found)

    def advice(self) -> Iterator[str]:
        """Nothing where the choice is within 3 percent of the best at every length; else what to do, with the line.

        That is the candidate with the smallest worst regret, if it does better than the choice.
        """
        offered = {str(verdict.candidate): verdict.candidate for verdict in self.plan.verdicts}
        eligible = [name for name in offered if all(name in _sound(cell) for cell in self.cells)]
        winner = min(eligible, key=self.worst, default=self.choice)
        (most, where), (now, at) = self.worst(winner), self.worst(self.choice)
        if now <= WITHIN or most == math.inf:
            return
        yield f"{self}: the choice, {self.choice}, is {_text(now)} behind the best at {at}."
        if most > WITHIN:
            yield f"No candidate is within {WITHIN:.0%} at every length: {winner} is {_text(most)} behind at {where}."
        if most < now:
            yield "For TABLE in flashgen/plan/tuned.py:"
            figure, command = self._figure(winner), self._command()
            yield tuned.line(self.plan.kernel, self.problem.spec, self.plan.arch, offered[winner], figure, command)

    def _figure(self, name: str) -> str:
        """Card, date and rates of a candidate, from the slowest cell to the fastest."""
        records = [(cell["results"][name], cell["flops"]) for cell in self.cells]
        rates = sorted(flops / record.get("ms", record.get("glance_ms")) / 1e9 for record, flops in records)
        span = " to ".join(dict.fromkeys(f"{rate:.0f}" for rate in (rates[0], rates[-1])))
        return f"{self.about['card']}, {max(cell['date'] for cell in self.cells)}, {span} TFLOP/s"

    def _command(self) -> str:
        """What measures these cells again."""
        first, seqlens = self.cells[0], tuple(cell["seqlen"] for cell in self.cells)
        preset = next((name for name, item in PRESETS.items() if item.seqlens == seqlens), None)
        lengths = f"--preset {preset}" if preset else " ".join(f"--seqlen {seqlen}" for seqlen in seqlens)
        mask = f"variant {first['variant']}" if first.get("variant") else mask_name(first["causal"])
        text = f"python -m flashgen tune --direction {first['direction']} --head-dim {first['head_dim']} --{mask} "
        text += f"{lengths} --rounds {first['rounds']}" + (f" --top {first['top']}" if first["top"] else "")
        usual = for_capability(*map(int, self.about["capability"].split(".")))
        return text + (f" --arch {self.about['arch']}" if self.about["arch"] != usual.name else "")


def groups(results: Results) -> list[Group]:
    """The cells by kernel, head_dim, mask, variant and the length that they count as: forward first, shorter first."""
    arch = parse_arch(results["about"]["arch"])
    found: dict[Problem, list[Cell]] = {}
    for cell in sorted(results["cells"], key=_place):
        made = problems(cell["direction"], cell["head_dim"], cell["causal"], arch, cell.get("variant", ""))
        problem = next(item for item in made if item.kernel == cell["kernel"]).at(cell["seqlen"])
        found.setdefault(problem, []).append(cell)
    return [Group(results["about"], problem, cells) for problem, cells in found.items()]


def _place(cell: Cell) -> tuple:
    mask = (cell["causal"], cell.get("variant", ""))
    return cell["direction"] != "fwd", cell["head_dim"], *mask, cell["kernel"], cell["seqlen"]


def table(made: Sequence[Group], card: str) -> Table:
    """A row for each cell: the choice and the best, with their times; then the largest regret and the mean."""
    grid = Table(title=f"The planner's choices on {card}: milliseconds, and how far behind the best")
    for heading in ("kernel", "head dim", "mask", "seqlen", "choice", "by", "ms", "best", "ms", "behind"):
        right = heading in ("head dim", "seqlen", "ms", "behind")
        grid.add_column(heading, justify="right" if right else "left", no_wrap=heading not in ("choice", "best"))
    values = []
    for group in made:
        for cell in group.cells:
            best, value = fastest(cell), regret(cell, group.choice)
            values += [] if value is None else [value]
            spec = group.problem.spec
            row = [group.problem.kernel.removeprefix("attention_"), str(spec.head_dim)]
            row += [mask_name(spec.causal, cell.get("variant", "")), str(cell["seqlen"]), group.choice]
            row += ["line" if group.plan.source.startswith("measurement") else "model", _time(cell, group.choice)]
            row += ["the same" if best == group.choice else best or "-", _time(cell, best)]
            grid.add_row(*row, "not timed" if value is None else _text(value, "[red]" if value > WITHIN else ""))
        grid.add_section()
    if values:
        within = f"{sum(value <= WITHIN for value in values)} of {len(values)} within {WITHIN:.0%}"
        grid.add_row("maximum", *[""] * 8, _text(max(values)), style="bold")
        grid.add_row("mean", *[""] * 3, within, *[""] * 4, _text(sum(values) / len(values)), style="bold")
    return grid


def _time(cell: Cell, name: str | None) -> str:
    """A candidate's milliseconds, with ~ where it was only glanced at."""
    record = cell["results"].get(name, {})
    return f"{record['ms']:.3f}" if "ms" in record else f"~{record['glance_ms']:.3f}" if "glance_ms" in record else "-"


def _text(value: float, style: str = "") -> str:
    return f"{style}{value:.1%}" if value < math.inf else "not timed"


def failures(made: Sequence[Group]) -> Iterator[str]:
    """A sentence for each candidate that failed, and one for all of a group that could not be compiled."""
    for group in made:
        records = [(name, cell["seqlen"], record) for cell in group.cells for name, record in cell["results"].items()]
        for name, seqlen, record in records:
            if "failed" in record:
                yield f"Failed: {group} at {seqlen}, {name}: {record['failed']}"
        left = {name: record["skipped"] for name, _, record in records if "skipped" in record}
        for name, reason in list(left.items())[:1]:
            yield f"Not timed: {len(left)} candidates of {group}; the first, {name}: {reason}"


def line(cell: Cell, problem: Problem) -> str:
    """A cell on one line, for the log while the tuner runs."""
    choice, best = str(problem.at(cell["seqlen"]).plan().candidate), fastest(cell)
    value, careful = regret(cell, choice), sum("ms" in record for record in cell["results"].values())
    text = f"{problem.kernel} {problem.spec} {cell['seqlen']}: {careful} timed of {len(cell['results'])}; "
    text += f"{_time(cell, choice)} ms, {'not timed' if value is None else _text(value)} behind"
    return text if best in (None, choice) else f"{text} {best}, {_time(cell, best)} ms"


def show(results: Results, console: Console) -> None:
    """Prints the table, the failures and the advice."""
    made = groups(results)
    console.print(table(made, results["about"]["card"]))
    for text in [*failures(made), *(text for group in made for text in group.advice())]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
