"""The benchmark as a function and as the command `python -m flashgen bench`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashgen.bench import grid, report
from flashgen.bench.peers import Peer, choose
from flashgen.bench.plot import plot
from flashgen.bench.variants import VARIANTS

DEVICE = "cuda"


class BenchError(RuntimeError):
    """The benchmark cannot run; the message is one sentence that says why and what to do."""


def require_gpu() -> None:
    """Raises BenchError unless torch sees a CUDA GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        raise BenchError("The benchmark needs torch: install it with `pip install flashgen[torch,bench]`.") from None
    if not torch.cuda.is_available():
        raise BenchError(
            "The benchmark times kernels on an NVIDIA GPU and torch sees none here: run it on a machine that has one."
        )


def run(
    preset: str = "spine",
    directions: Sequence[str] = grid.DIRECTIONS,
    peers: Sequence[str] | None = None,
    head_dims: Sequence[int] | None = None,
    seqlens: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
    variants: Sequence[str] = (),
    rounds: int = 7,
    out: str | Path = "bench-results",
    seed: int = 0,
    *,
    sustained_s: float = 0.0,
    date: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Times flashgen and its peers, writes bench.json, bench.txt and bench.png into `out`, returns the results.

    `peers` None means every installed peer that is on by default; the axes replace those of the preset. sustained_s:
    instead of rounds, each by itself for so many seconds, of which the second half counts.
    The results: {"preset", "date", "seed", "rounds", "sustained_s", "environment",
    "cublas_tflops": {"cold", "before", "after"},
    "peers": {name: {"version"} or {"unavailable"}}, "cells": [{"direction", "head_dim", "causal", "seqlen", "batch",
    "heads", "flops", "results": {peer: {"tflops", "ms", "spread", "rounds_ms", "launches", "error", "row_error"} or
    {"skipped"} or {"failed"}}}], "host_us": {"d128 causal": {peer: microseconds}}, "summary"}. Times are milliseconds a
    launch, rates TFLOP/s, errors relative to torch's own attention.
    """
    require_gpu()
    console = console or make_console()
    try:
        cells = grid.cells(preset, directions, head_dims, causal, seqlens, variants)
        chosen, missing = choose(peers)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if not chosen:
        raise BenchError(f"None of the peers can run here: {'; '.join(missing.values())}.")
    results = opening(preset, rounds, sustained_s, seed, date, chosen, missing)
    try:
        measure_all(results, cells, chosen, console, Path(out))
    finally:  # an interrupted run keeps what it has
        finish(results, Path(out), console)
    return results


def opening(
    preset: str,
    rounds: int,
    sustained_s: float,
    seed: int,
    date: str,
    chosen: Sequence[Peer],
    missing: dict[str, str],
) -> dict[str, Any]:
    """The results before anything is measured."""
    from flashgen.bench.measure import environment

    about = {peer.name: {"title": peer.title, "version": peer.version()} for peer in chosen}
    about |= {name: {"unavailable": why} for name, why in missing.items()}
    return {
        "preset": preset,
        "date": date,
        "seed": seed,
        "rounds": rounds,
        "sustained_s": sustained_s,
        "environment": environment(),
        "cublas_tflops": {"cold": 0.0, "before": 0.0, "after": None},
        "peers": about,
        "cells": [],
        "host_us": {},
        "summary": {},
    }


def measure_all(
    results: dict[str, Any], cells: Sequence[grid.Cell], chosen: Sequence[Peer], console: Console, out: Path
) -> None:
    """Preheats, times every cell and the host, and asks cuBLAS again; fills `results` as it goes."""
    from flashgen.bench import measure

    clock = measure.CudaClock()
    heater = measure.Heater(clock, DEVICE)
    harness = measure.Harness(clock, heater, DEVICE, results["rounds"], results["seed"], results["sustained_s"])
    results["rounds"] = harness.rounds
    with make_progress(console) as progress:
        task = progress.add_task("preheating the card", total=len(cells))
        cold, before = heater.settle()
        results["cublas_tflops"] |= {"cold": cold, "before": before}
        progress.console.print(f"cuBLAS 8192-cubed bf16: {cold:.0f} TFLOP/s cold, {before:.0f} warm")
        for cell in cells:
            progress.update(task, description=str(cell))
            results["cells"].append(harness.measure(cell, chosen))
            report.save(results, out / "bench.json")
            progress.console.print(report.line(results["cells"][-1]), markup=False, highlight=False)
            progress.advance(task)
        results["cublas_tflops"]["after"] = heater.rate(100)
        progress.update(task, description="host time")
        plain = [cell for cell in cells if cell.direction == "fwd" and not cell.variant]
        for head_dim, causal in dict.fromkeys((cell.head_dim, cell.causal) for cell in plain):
            case = f"d{head_dim} {'causal' if causal else 'full'}"
            results["host_us"][case] = dict(harness.host_us(chosen, head_dim, causal))


def finish(results: dict[str, Any], out: Path, console: Console) -> None:
    """Writes the files and prints the table; nothing if no cell was timed."""
    if not results["cells"]:
        return
    results["summary"] = report.summary(results)
    report.save(results, out / "bench.json")
    report.show(results, console)
    with (out / "bench.txt").open("w") as file:
        report.show(results, Console(file=file, width=140, color_system=None))
    try:
        plot(results, out / "bench.png")
    except ModuleNotFoundError:
        console.print("No plot: matplotlib is not installed (`pip install flashgen[bench]`).")
    console.print(f"Written to {out}/: bench.json, bench.txt, bench.png", markup=False, highlight=False)


def make_console(width: int = 120) -> Console:
    """The terminal; wide enough for the table where the output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def make_progress(console: Console) -> Progress:
    """A bar that says which cell is timed, how many are done and how long it will take."""
    columns = (TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console)


def own_failures(results: dict[str, Any]) -> int:
    """In how many cells flashgen failed or was wrong."""
    return sum("failed" in cell["results"].get(report.OWN, {}) for cell in results["cells"])


PRESET_HELP = "Part of the grid: " + "; ".join(f"{name}: {preset.why}" for name, preset in grid.PRESETS.items()) + "."
PEERS_HELP = (
    "Comma-separated: flashgen, fa2, cudnn, flex, varlen, fa3, fa4. "
    "Default: all that are installed, without flex and varlen."
)
SUSTAINED_HELP = (
    "Instead of short rounds in turns, each by itself for so long, at the clock that its own power allows; the second "
    "half counts."
)
VARIANT_HELP = "Time these instead, packed with lengths of its own. Repeatable."


def grid_options(function: Callable) -> Callable:
    """The options that say which cells are timed."""
    for option in reversed(
        (
            click.option(
                "--preset", type=click.Choice(list(grid.PRESETS)), default="spine", show_default=True, help=PRESET_HELP
            ),
            click.option(
                "--direction", type=click.Choice(grid.DIRECTIONS), multiple=True, help="Default: both. Repeatable."
            ),
            click.option(
                "--head-dim", type=click.IntRange(8, 256), multiple=True, help="Replaces the preset's. Repeatable."
            ),
            click.option("--seqlen", type=click.IntRange(1), multiple=True, help="Replaces the preset's. Repeatable."),
            click.option("--causal/--full", "causal", default=None, help="Only this mask. Default: both."),
        )
    ):
        function = option(function)
    return function


@click.command("bench")
@grid_options
@click.option("--variant", type=click.Choice(list(VARIANTS)), multiple=True, help=VARIANT_HELP)
@click.option("--peers", "names", metavar="NAMES", help=PEERS_HELP)
@click.option("--rounds", type=click.IntRange(5), default=7, show_default=True, help="Rounds; the median counts.")
@click.option("--sustained", type=click.FloatRange(0.1), metavar="SECONDS", help=SUSTAINED_HELP)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the inputs and of the order of competitors.")
@click.option("--out", type=click.Path(file_okay=False), default="bench-results", show_default=True, help="Folder.")
def command(
    preset: str,
    direction: tuple[str, ...],
    variant: tuple[str, ...],
    names: str | None,
    head_dim: tuple[int, ...],
    seqlen: tuple[int, ...],
    causal: bool | None,
    rounds: int,
    sustained: float | None,
    seed: int,
    out: str,
) -> None:
    """Time flashgen beside what else is installed, on this machine's GPU.

    Every cell has batch * seqlen = 16384 and heads * head_dim = 2048 in bf16; the variant packed has 64 sequences of 32
    to 4096 tokens. Writes bench.json, bench.txt and bench.png. The spine preset takes about a minute.

    \b
    python -m flashgen bench --preset quick
    python -m flashgen bench --direction fwd --head-dim 128 --causal --peers flashgen,fa2
    python -m flashgen bench --variant softcap --variant document --seqlen 4096 --peers flashgen,flex,fa4
    python -m flashgen bench --variant packed --peers flashgen,flex,varlen,fa3,fa4
    python -m flashgen bench --preset full --direction fwd --sustained 1
    """
    try:
        results = run(
            preset,
            direction or grid.DIRECTIONS,
            [name.strip() for name in names.split(",") if name.strip()] if names else None,
            head_dim or None,
            seqlen or None,
            None if causal is None else (causal,),
            variant,
            rounds,
            out,
            seed,
            sustained_s=sustained or 0.0,
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )
    except BenchError as error:
        raise click.ClickException(str(error)) from None
    if own_failures(results):
        raise click.ClickException(f"flashgen failed in {own_failures(results)} of {len(results['cells'])} cells.")
