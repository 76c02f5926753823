"""The debugging switches: the four environment variables of the README, read here (the cache reads its own).

FLASHGEN_DEBUG: 1 compiles, cache, registers and spills; 2 also the plan; 3 the IR after each pass that changed it;
4 CUDA; 5 SASS. FLASHGEN_DUMP: a directory in which each stage is written as a numbered file.
FLASHGEN_INTERPRET=1: run everything on the interpreter.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger("flashgen")
VARIABLES = {
    "FLASHGEN_DEBUG": "1 compiles, 2 plan, 3 IR after each pass, 4 CUDA, 5 SASS",
    "FLASHGEN_DUMP": "a folder for each stage as a numbered file",
    "FLASHGEN_INTERPRET": "1: run everything on the CPU interpreter",
    "FLASHGEN_CACHE_DIR": "where compiled kernels are kept",
}
_numbers = itertools.count()


def variables() -> list[tuple[str, str, str | None]]:
    """The name, the meaning and the value (None where it is not set) of each variable that flashgen reads."""
    return [(name, meaning, os.environ.get(name)) for name, meaning in VARIABLES.items()]


def level() -> int:
    """The debug level, 0 where it is not set."""
    value = os.environ.get("FLASHGEN_DEBUG", "0")
    if not value.isdigit():
        raise ValueError(f"FLASHGEN_DEBUG = {value!r} must be a number from 0 to 5")
    return int(value)


def interpret() -> bool:
    """True where FLASHGEN_INTERPRET asks for the interpreter."""
    return os.environ.get("FLASHGEN_INTERPRET", "0") not in ("", "0")


def show(needed: int, kind: str, name: str, text: str) -> None:
    """Print a stage's text at its debug level, and write it where FLASHGEN_DUMP says."""
    if level() >= needed:
        print(f"--- {kind} {name}\n{text}", file=sys.stderr)
    folder = os.environ.get("FLASHGEN_DUMP")
    if folder:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"{next(_numbers):03d}-{name}.{kind}").write_text(text)


def watching() -> bool:
    """True where some stage is to be shown."""
    return level() >= 2 or bool(os.environ.get("FLASHGEN_DUMP"))


def configure_logging() -> None:
    """At FLASHGEN_DEBUG >= 1, send the log of compiles and cache to standard error."""
    if level() >= 1 and not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
