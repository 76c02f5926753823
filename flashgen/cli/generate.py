"""`python -m flashgen generate`: generated/, and the compile check of every kernel in it for every chip."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashgen import catalog
from flashgen.catalog import Entry
from flashgen.emit.env import PACKAGE

if TYPE_CHECKING:
    from flashgen.plan.plan import Candidate
    from flashgen.runtime.compile import Cubin

ENDINGS = {".cu", ".ir", ".plan"}
SLOW_SECONDS = 2.0
WIDTH = 150  # of the table where the output is not a terminal


@click.command("generate")
@click.option(
    "--check", is_flag=True, help="Write and compile nothing; exit 1 where a file is not what is emitted now."
)
@click.option("--no-compile", is_flag=True, help="Write the files and compile nothing.")
@click.option("--jobs", type=click.IntRange(1), help="Compiles at once.  [default: one a core]")
@click.option("--out", type=click.Path(file_okay=False), help="The folder.  [default: generated/ of this checkout]")
def command(check: bool, no_compile: bool, jobs: int | None, out: str | None) -> None:
    """Write the catalog's kernels to generated/ and compile them for sm_80, sm_86, sm_89, sm_90, sm_90a and sm_120.

    generated/ holds the sm_80 text of each kernel: .cu, .ir (TILE, then MACHINE) and .plan. Files that no longer
    belong to the catalog are removed. Each chip is compiled with its own plan; the table shows registers, spills and
    the time of the compile (kept in the cache, so that a second run is quick). A kernel that spills is a failure.

    \b
    Examples:
      python -m flashgen generate                         write, compile, print the table
      python -m flashgen generate --check                 is generated/ up to date? (no NVRTC)
      python -m flashgen generate --out /tmp/kernels --no-compile
    """
    folder = Path(out) if out else repository_folder()
    console = make_console()
    expected = emit_files(console)
    if check:
        compare(folder, expected)
        console.print(f"{folder}: {len(expected)} files, up to date", markup=False, highlight=False)
        return
    changed, removed = write(folder, expected)
    message = f"{folder}: {len(expected)} files, {changed} written, {removed} removed"
    console.print(message, markup=False, highlight=False)
    if not no_compile:
        compile_all(console, jobs)


def repository_folder() -> Path:
    """generated/ of the checkout that this package lies in. Raises ValueError where it is installed from a wheel."""
    root = PACKAGE.parent
    if not (root / "pyproject.toml").is_file() or not (root / "templates").is_dir():
        raise ValueError("flashgen is installed without its repository, so there is no generated/; pass --out FOLDER")
    return root / "generated"


def make_console() -> Console:
    """The terminal; wide enough for the table where the output goes to a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def make_progress(console: Console) -> Progress:
    """A bar with what is at work, how many are done and the time so far."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console)


def emit_files(console: Console) -> dict[str, str]:
    """All files of the catalog: path below generated/ -> text."""
    texts: dict[str, str] = {}
    with make_progress(console) as progress:
        task = progress.add_task("emitting", total=len(catalog.SPECS))
        for spec in catalog.SPECS:
            progress.update(task, description=f"emitting {spec}")
            texts |= catalog.files(spec)
            progress.advance(task)
        progress.update(task, description="emitted")
    return texts


def present(folder: Path) -> set[str]:
    """The files below a folder that are of a kind that this command writes."""
    files = (path for path in folder.rglob("*") if path.suffix in ENDINGS and path.is_file())
    return {path.relative_to(folder).as_posix() for path in files}


def compare(folder: Path, expected: dict[str, str]) -> None:
    """Raises ClickException with a line for each file that is stale, missing or extra."""
    there = present(folder)
    lines = [f"missing  {name}" for name in expected.keys() - there]
    lines += [f"extra    {name}" for name in there - expected.keys()]
    lines += [
        f"stale    {name}"
        for name in there & expected.keys()
        if (folder / name).read_bytes() != expected[name].encode()
    ]
    if lines:
        listing = "".join(f"\n  {line}" for line in sorted(lines))
        raise click.ClickException(f"{folder} is not what is emitted now; run make generate{listing}")


def write(folder: Path, expected: dict[str, str]) -> tuple[int, int]:
    """Write what differs and remove what is not expected; how many of each. Files of other kinds are left alone."""
    extra = present(folder) - expected.keys()
    for name in extra:
        (folder / name).unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    changed = 0
    for name, text in expected.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == text.encode():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        changed += 1
    return changed, len(extra)


def compile_all(console: Console, jobs: int | None) -> None:
    """Compile every kernel for every chip and print the table. Raises ClickException where a kernel spills."""
    from flashgen.runtime.compile import compile_many

    start = time.perf_counter()
    with make_progress(console) as progress:
        task = progress.add_task("planning every chip", total=len(catalog.SPECS))
        kernels = catalog.Kernels()
        for spec in catalog.SPECS:
            kernels.add(spec)
            progress.advance(task)
        entries = kernels.entries
        task = progress.add_task("compiling", total=len(entries))

        def advance(done: int, of: int, cubin: Cubin) -> None:
            progress.update(task, completed=done, description=f"compiled {cubin.name} for {cubin.arch}")

        work = [(entry.stages.source, entry.stages.plan.arch.target) for entry in entries]
        cubins = compile_many(work, jobs, advance)
    console.print(table(entries, cubins))
    report(console, entries, cubins, time.perf_counter() - start)


def table(entries: list[Entry], cubins: list[Cubin]) -> Table:
    """A row for each compiled kernel: what it is, its plan, and what ptxas says of it."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("kernel", "spec", "arch"):
        made.add_column(name, no_wrap=True)
    made.add_column("tile")
    for name in ("stages", "shared", "registers", "spills", "seconds"):
        made.add_column(name, justify="right", no_wrap=True)
    for entry, cubin in zip(entries, cubins, strict=True):
        plan, said = entry.stages.plan, cubin.report
        slow = said.seconds > SLOW_SECONDS
        made.add_row(
            cubin.name.removeprefix("attention_"),
            str(entry.specs[0]) + (f" +{len(entry.specs) - 1}" if len(entry.specs) > 1 else ""),
            cubin.arch,
            tile_text(plan.candidate),
            stages_text(plan.candidate),
            f"{plan.shared_bytes / 1024:.1f} KiB",
            str(said.registers),
            f"[red]{spilled(cubin)}[/red]" if spilled(cubin) else "0",
            f"[yellow]{said.seconds:.2f}[/yellow]" if slow else f"{said.seconds:.2f}",
        )
    return made


def tile_text(candidate: Candidate) -> str:
    """Blocks and warps: "q 128 x kv 64, 8 warps"."""
    tile = " x ".join(f"{name.removeprefix('block_')} {size}" for name, size in candidate.blocks)
    return f"{tile}, {candidate.warps} warp{'s' * (candidate.warps != 1)}"


def stages_text(candidate: Candidate) -> str:
    """How deep each tile is staged, "1 2" where they differ."""
    depths = [str(count) for name, count in candidate.stages if name.endswith("_tile")]
    return " ".join(dict.fromkeys(depths)) or "-"


def spilled(cubin: Cubin) -> int:
    """Bytes that a thread spills: stores and loads."""
    return cubin.report.spill_stores + cubin.report.spill_loads


def report(console: Console, entries: list[Entry], cubins: list[Cubin], seconds: float) -> None:
    """The closing lines: how many, how long, what is slow. Raises ClickException, naming them, where kernels spill."""
    named = [
        (f"{cubin.name} of {entry.specs[0]} for {cubin.arch}", cubin)
        for entry, cubin in zip(entries, cubins, strict=True)
    ]
    cached = sum(cubin.report.cached for cubin in cubins)
    slow = [f"{name} ({cubin.report.seconds:.1f} s)" for name, cubin in named if cubin.report.seconds > SLOW_SECONDS]
    spills = [f"{name} ({spilled(cubin)} bytes)" for name, cubin in named if spilled(cubin)]
    message = f"{len(cubins)} cubins in {seconds:.0f} s, {cached} of them from the cache, {len(spills)} spill"
    console.print(message, markup=False, highlight=False)
    for name in slow:
        console.print(f"over {SLOW_SECONDS:g} s to compile: {name}", markup=False, highlight=False)
    if spills:
        raise click.ClickException("these kernels spill:" + "".join(f"\n  {name}" for name in spills))
