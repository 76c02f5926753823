"""What stands for arrays while a function is traced: the last arguments of mask and score functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any

from flashgen.ir.dtype import BF16, F16, F32, I32, DType
from flashgen.ir.expr import Const, Load, text
from flashgen.spec import Array
from flashgen.trace.value import FLOAT, INT, Value, line, value

DTYPES = {dtype.name: dtype for dtype in (F32, BF16, F16, I32)}
DTypes = tuple[DType, ...]


class Elements:
    """What stands for an array: only its elements can be asked for. How many indices they take is its rank."""

    def __init__(self, name: str, dtype: DType) -> None:
        self.name = name
        self.dtype = dtype
        self.rank = 0

    def __getitem__(self, index: Any) -> Value:
        parts = [value(part) for part in (index if isinstance(index, tuple) else (index,))]
        if not parts or self.rank not in (0, len(parts)):
            raise TypeError(f"{line()}: {self.name} has {self.rank or 1} indices or more; give it as many everywhere")
        for part in parts:
            if part.kind != INT:
                raise TypeError(f"{line()}: {self.name} is indexed by {text(part.expr)}, {part.kind}; use an integer")
            if isinstance(part.expr, Const) and part.expr.value < 0:
                raise ValueError(f"{line()}: index {part.expr.value} of {self.name} is negative; count from the front")
        self.rank = len(parts)
        return Value(Load(self.name, tuple(part.expr for part in parts)), INT if self.dtype == I32 else FLOAT)

    def __iter__(self) -> Any:
        raise TypeError(f"{line()}: {self.name} is not known while it is traced; index it, as in {self.name}[b, q_idx]")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{line()}: {self.name}.{name} is not known while it is traced; only its elements are")

    def array(self, kind: str) -> Array:
        if not self.rank:
            raise ValueError(f"{kind}_mod never indexes its argument {self.name.removeprefix(f'{kind}_')}; take it out")
        return Array(self.name, self.rank, self.dtype)


def parameters(function: Any, kind: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The names, in a kernel, of the arguments that a function has beyond the given ones: those without a default.

    Raises TypeError for what is no function of the given arguments.
    """
    if not callable(function):
        raise TypeError(f"{kind}_mod = {function!r} must be a function of {', '.join(arguments)}")
    try:
        signature = inspect.signature(function)
        positional = [item for item in signature.parameters.values() if item.kind <= item.POSITIONAL_OR_KEYWORD]
        further = [item.name for item in positional[len(arguments) :] if item.default is item.empty]
        signature.bind(*arguments, *further)
    except (TypeError, ValueError):
        expected = ", ".join(arguments)
        raise TypeError(f"{kind}_mod is called with {expected} and arrays; give it these arguments") from None
    return tuple(f"{kind}_{name if name.isascii() else place}" for place, name in enumerate(further))


def assumptions(kind: str, count: int) -> Iterator[DTypes]:
    """Types of so many arrays to try where none are given: integers for a mask and numbers for a score come first."""
    return product(*[(I32, F32) if kind == "mask" else (F32, I32)] * count)
