"""What the compiler is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One kernel's CUDA: the name of its extern "C" function, its text, and the headers it includes (name, text)."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]
