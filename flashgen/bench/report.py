"""What is made of the measurements: the JSON file, the ratios, the table, the sentences under it.

The results are one dictionary (see `run.run`), and everything here is a function of it: an old file can be shown again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flashgen.bench.grid import mask_name

OWN = "flashgen"
NOTABLE_SPREAD = 0.10


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the results as JSON; through a temporary file, so that a reader never sees half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n")
    temporary.replace(path)


def load(path: Path) -> dict[str, Any]:
    """Results that `save` wrote."""
    return json.loads(path.read_text())


def tflops(cell: dict[str, Any], peer: str) -> float | None:
    """TFLOP/s of a peer in a cell, or None where it has none."""
    return cell["results"].get(peer, {}).get("tflops")


def best_peer(cell: dict[str, Any]) -> str | None:
    """The fastest of the others in a cell."""
    rates = {name: rate for name in cell["results"] if name != OWN and (rate := tflops(cell, name)) is not None}
    return max(rates, key=lambda name: rates[name]) if rates else None


def ratio(cell: dict[str, Any], peer: str | None) -> float | None:
    """How many times as fast as a peer flashgen is in a cell; None where either is missing."""
    own, other = tflops(cell, OWN), tflops(cell, peer) if peer else None
    return own / other if own and other else None


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def summary(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For each direction the geometric mean of flashgen's ratio to each peer and to the best peer of each cell.

    {"fwd": {"best": 0.61, "fa2": 1.02, ..., "cells": 16}}: a peer is left out where no cell has both.
    """
    answer: dict[str, dict[str, Any]] = {}
    for direction in directions(results):
        chosen = [cell for cell in results["cells"] if cell["direction"] == direction]
        means: dict[str, Any] = {"best": geometric_mean(r for c in chosen if (r := ratio(c, best_peer(c))))}
        for peer in peer_names(results):
            if peer != OWN:
                means[peer] = geometric_mean(r for c in chosen if (r := ratio(c, peer)))
        answer[direction] = {name: mean for name, mean in means.items() if mean is not None} | {"cells": len(chosen)}
    return answer


def directions(results: dict[str, Any]) -> list[str]:
    """The directions that were timed, in the order of the cells."""
    return list(dict.fromkeys(cell["direction"] for cell in results["cells"]))


def peer_names(results: dict[str, Any]) -> list[str]:
    """The peers that were timed, flashgen first."""
    return [name for name, about in results["peers"].items() if not about.get("unavailable")]


def entry(cell: dict[str, Any], peer: str, fastest: float) -> str:
    """A cell of the table: the rate, bold if it is the highest of the row, or a word."""
    result = cell["results"].get(peer, {})
    if "failed" in result:
        return "[red]wrong[/]" if result["failed"].startswith("wrong") else "[red]failed[/]"
    if "tflops" not in result:
        return "[dim]-[/]"
    text = f"{result['tflops']:.0f}"
    return f"[bold]{text}[/]" if result["tflops"] == fastest else text


def table(results: dict[str, Any]) -> Table:
    """TFLOP/s of each peer, one row a cell, with flashgen's ratio to the best of the others and to FlashAttention-2."""
    names = peer_names(results)
    means = summary(results)
    against_fa2 = "fa2" in names and OWN in names
    grid = Table(title=f"bf16 attention on {results['environment']['card']}, TFLOP/s", header_style="bold")
    for heading in ("direction", "head dim", "mask", "seqlen"):
        grid.add_column(heading, justify="right" if heading in ("head dim", "seqlen") else "left")
    for heading in [*names, *(["/ best"] if OWN in names else []), *(["/ fa2"] if against_fa2 else [])]:
        grid.add_column(heading, justify="right")
    for direction in directions(results):
        for cell in (cell for cell in results["cells"] if cell["direction"] == direction):
            grid.add_row(*_row(cell, names, against_fa2))
        tail = [_number(means[direction].get("best"))] if OWN in names else []
        tail += [_number(means[direction].get("fa2"))] if against_fa2 else []
        grid.add_section()
        grid.add_row(direction, "", "", "mean", *("" for _ in names), *tail, style="bold", end_section=True)
    return grid


def _row(cell: dict[str, Any], names: Sequence[str], against_fa2: bool) -> list[str]:
    fastest = max((rate for name in names if (rate := tflops(cell, name)) is not None), default=0.0)
    row = [cell["direction"], str(cell["head_dim"]), mask(cell), str(cell["seqlen"])]
    row += [entry(cell, name, fastest) for name in names]
    if OWN in names:
        row.append(_number(ratio(cell, best_peer(cell))))
    if against_fa2:
        row.append(_number(ratio(cell, "fa2")))
    return row


def _number(value: float | None) -> str:
    return "[dim]-[/]" if value is None else f"{value:.2f}"


def sentences(results: dict[str, Any]) -> list[str]:
    """What the table cannot say: the card, cuBLAS, the versions, means, host time, noise and failures."""
    about, cublas = results["environment"], results["cublas_tflops"]
    after = "not measured" if cublas.get("after") is None else f"{cublas['after']:.0f}"
    rounds = f"{results['rounds']} shuffled rounds a cell, medians"
    if results.get("sustained_s"):
        rounds = f"Each by itself for {results['sustained_s']:g} s a cell, of which the second half counts"
    lines = [
        f"Card: {about['card']}, {about['multiprocessors']} multiprocessors, driver {about['driver']}, "
        f"CUDA {about['cuda']}, torch {about['torch']}.",
        f"cuBLAS 8192-cubed bf16, TFLOP/s: {cublas['cold']:.0f} cold, {cublas['before']:.0f} before, {after} after.",
        f"{rounds}; seed {results['seed']}; {results['date'] or 'no date'}.",
    ]
    lines += [f"{name}: {peer.get('unavailable') or peer['version']}." for name, peer in results["peers"].items()]
    for direction, means in summary(results).items():
        shown = ", ".join(f"{mean:.3f} of {name}" for name, mean in means.items() if name != "cells")
        if shown:
            lines.append(f"{direction}: flashgen reaches, in the geometric mean, {shown}.")
    for case, times in results.get("host_us", {}).items():
        shown = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
        lines.append(f"Host time of a forward call, {case}, us: {shown}.")
    return lines + noise(results) + failures(results)


def noise(results: dict[str, Any]) -> list[str]:
    """A sentence for each cell and peer whose rounds lie more than 10 percent apart."""
    found = []
    for cell in results["cells"]:
        for name, result in cell["results"].items():
            if result.get("spread", 0.0) > NOTABLE_SPREAD:
                found.append(f"Noise: {label(cell)}, {name}: the rounds lie {result['spread']:.0%} apart.")
    return found if len(found) <= 8 else [*found[:8], f"Noise: {len(found) - 8} more such; see the JSON file."]


def failures(results: dict[str, Any]) -> list[str]:
    """A sentence for each failure, cells with the same one together."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for cell in results["cells"]:
        for name, result in cell["results"].items():
            if "failed" in result:
                grouped.setdefault((name, result["failed"]), []).append(label(cell))
    return [f"Not timed: {name} in {'; '.join(cells)}: {why}" for (name, why), cells in grouped.items()]


def label(cell: dict[str, Any]) -> str:
    """A cell in a few words."""
    return f"{cell['direction']} d{cell['head_dim']} {mask(cell)} {cell['seqlen']}"


def mask(cell: dict[str, Any]) -> str:
    """The mask of a cell, and its variant."""
    return mask_name(cell["causal"], cell.get("variant", ""))


def line(cell: dict[str, Any]) -> str:
    """A cell and its rates on one line, for the log while the benchmark runs."""
    rates = (f"{name} {rate:.0f}" for name in cell["results"] if (rate := tflops(cell, name)) is not None)
    failed = (f"{name} {result['failed']}" for name, result in cell["results"].items() if "failed" in result)
    return f"{label(cell):24s} {'  '.join([*rates, *failed])}"


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the table and the sentences."""
    console.print(table(results))
    for text in sentences(results):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
