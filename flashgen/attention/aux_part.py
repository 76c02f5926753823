"""What of the gradient of an array one kernel makes: `Part`, which attention/backward_aux.py has loop nests for."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.calculus import by_distance
from flashgen.ir.dtype import F32, I64, DType
from flashgen.ir.expr import Expr, Load, variables

ROWS, COLUMNS, PAIRS, DIAGONALS = "rows", "columns", "pairs", "diagonals"


@dataclass(frozen=True)
class Part:
    """The gradient through one load of an array.

    load: as the score function has it. index: the same with 0 for axes of one element.
    plain: of names and constants, as attention/backward_aux.py says; never of packed sequences.
    dtype: of what single elements are written to: that of the array where it is plain, else float32; int64 for
        additions that have no order but are to repeat.
    packed: sequences lie behind each other, and no two have their tiles at the same distances.
    magnitude: the sums of rows of |g| instead, which say what the integers stand for.
    """

    load: Load
    index: tuple[Expr, ...]
    plain: bool
    dtype: DType = F32
    packed: bool = False
    magnitude: bool = False

    @property
    def walk(self) -> str:
        """The nest that it takes."""
        names = self._names()
        if self.magnitude:
            return ROWS
        if not {"q_idx", "kv_idx"} <= names:
            return COLUMNS if "kv_idx" in names else ROWS
        if self.plain:
            return ROWS if {"b", "h"} <= names else PAIRS
        distances = not self.packed and all(by_distance(part, "q_idx", "kv_idx") for part in self.index)
        return DIAGONALS if distances else ROWS

    @property
    def by_pair(self) -> bool:
        """True where it is written element by element, and not by rows."""
        return not self.magnitude and {"q_idx", "kv_idx"} <= self._names()

    @property
    def target(self) -> str:
        """What the kernel writes: `sums` (batch, heads, row), or `grad`, which is like the array."""
        return "sums" if self.magnitude or (self.plain and not self.by_pair) else "grad"

    @property
    def ordered(self) -> bool:
        """True where its sum is one of integers."""
        return self.dtype == I64

    def _names(self) -> set[str]:
        return set().union(*map(variables, self.index))
