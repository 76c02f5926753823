"""The debugging switches: the four environment variables of the README, read here (the cache reads its own).

FLASHGEN_DEBUG: 1 compiles, cache, registers and spills; 2 also the plan; 3 the IR after each pass that changed it;
4 CUDA; 5 SASS, where CUDA's disassembler is installed. FLASHGEN_DUMP: a directory in which each stage is written as a
numbered file. FLASHGEN_INTERPRET=1: run everything on the interpreter.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
from pathlib import Path

log = logging.getLogger("flashgen")
LEVELS = ("compiles", "plan", "IR after each pass", "CUDA", "SASS")  # of FLASHGEN_DEBUG, from 1 on
VARIABLES = {
    "FLASHGEN_DEBUG": ", ".join(f"{number} {what}" for number, what in enumerate(LEVELS, 1)),
    "FLASHGEN_DUMP": "a folder for each stage as a numbered file",
    "FLASHGEN_INTERPRET": "1: run everything on the CPU interpreter",
    "FLASHGEN_CACHE_DIR": "where compiled kernels are kept",
}
_numbers = itertools.count()


def variables() -> list[tuple[str, str, str | None]]:
    """The name, the meaning and the value (None where it is not set) of each variable that flashgen reads."""
    return [(name, meaning, os.environ.get(name)) for name, meaning in VARIABLES.items()]


def level() -> int:
    """The debug level, 0 where it is not set. Raises ValueError for what is no level."""
    value = os.environ.get("FLASHGEN_DEBUG") or "0"
    if value not in map(str, range(len(LEVELS) + 1)):
        raise ValueError(f"FLASHGEN_DEBUG = {value!r} must be a number from 0 to {len(LEVELS)}; set one or unset it")
    return int(value)


def interpret() -> bool:
    """True where FLASHGEN_INTERPRET asks for the interpreter."""
    return os.environ.get("FLASHGEN_INTERPRET", "0") not in ("", "0")


def show(needed: int, kind: str, name: str, text: str) -> None:
    """Print a stage's text at its debug level, and write it where FLASHGEN_DUMP says. Raises OSError."""
    if level() >= needed:
        print(f"--- {kind} {name}\n{text}", file=sys.stderr)
    folder = os.environ.get("FLASHGEN_DUMP")
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, f"{next(_numbers):03d}-{name}.{kind}").write_text(text)
        except OSError as error:
            raise OSError(f"FLASHGEN_DUMP = {folder!r} takes no file ({error}); set a folder or unset it") from None


def watching(needed: int = 2) -> bool:
    """True where a stage of this debug level (by default, some stage) is to be shown."""
    return level() >= needed or bool(os.environ.get("FLASHGEN_DUMP"))


class _StandardError(logging.Handler):
    """Prints each record to what is standard error at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


_handler = _StandardError()  # one: to add it twice, from two threads, changes nothing


def configure_logging() -> None:
    """At FLASHGEN_DEBUG >= 1, send the log of compiles and cache to standard error."""
    if level() >= 1 and not log.handlers:
        log.addHandler(_handler)
        log.setLevel(logging.INFO)
