"""`python -m flashgen env`: what is installed here, for people and for bug reports."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from importlib import metadata

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import flashgen
from flashgen import debug
from flashgen.runtime import cache

PACKAGES = ("numpy", "jinja2", "networkx", "torch")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
MISSING = "not installed"


@click.command("env")
def command() -> None:
    """Show the versions, the GPUs, the cache of compiled kernels and the environment variables.

    Nothing heavy is imported and no GPU is needed; paste the output into a bug report.

    \b
    Examples:
      python -m flashgen env
      FLASHGEN_CACHE_DIR=/tmp/kernels python -m flashgen env
    """
    rows = [*versions(), *devices(), ("cache", cache_text())]
    rows += [(name, f"{value or 'not set'}  ({meaning})") for name, meaning, value in debug.variables()]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))  # as Text: a path may hold what looks like markup
    (Console() if sys.stdout.isatty() else Console(width=200)).print(table, highlight=False)


def versions() -> list[tuple[str, str]]:
    """Names and versions of the software, found without importing it."""
    rows = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    rows.append(("flashgen", flashgen.__version__))
    rows += [(name, version_of(name)) for name in PACKAGES]
    cupy = [f"{version_of(name)} ({name})" for name in CUPY if version_of(name) != MISSING]
    rows.append(("cupy", cupy[0] if cupy else f"{MISSING}; pip install 'flashgen[cuda]'"))
    rows.append(("nvrtc", cache.installed_nvrtc() or "no wheel that belongs to CuPy"))
    return rows


def version_of(package: str) -> str:
    """The version of an installed distribution."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING


def devices() -> list[tuple[str, str]]:
    """The driver and each GPU, as nvidia-smi tells them."""
    query = "driver_version,index,name,compute_cap,memory.total"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [("gpu", "none (nvidia-smi is not here)")]
    try:
        run = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
        answer = subprocess.run(run, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return [("gpu", f"unknown: {error}")]
    cards = [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.count(",") == 4]
    if not cards:
        return [("gpu", "none")]
    rows = [("driver", cards[0][0])]
    return rows + [
        (f"gpu {index}", f"{name}, compute capability {cc}, {memory}") for _, index, name, cc, memory in cards
    ]


def cache_text() -> str:
    """Where compiled kernels are kept, how many, and how large they are."""
    folder = cache.directory()
    sizes = [file.stat().st_size for file in folder.glob("*.cubin")] if folder.is_dir() else []
    return f"{folder}, {len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB"
