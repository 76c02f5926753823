"""What the interpreters share: rounding to storage types, vectorised expressions, and the errors that they report.

Numbers are as on the GPU: every floating-point value is float32, integers stay integers until they meet a float.
`in_float64` makes it float64 instead, for a run that says what rounding costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np

from flashgen.interp import philox
from flashgen.ir.dtype import BF16, F16, I32, DType
from flashgen.ir.expr import (
    COMPARE,
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Random,
    Search,
    Select,
    Unary,
    Var,
    children,
    text,
)

Value = Any  # a Python or NumPy scalar, or an array that broadcasts with the others of its expression


_REAL: ContextVar[type[np.floating]] = ContextVar("real", default=np.float32)


def real() -> type[np.floating]:
    """The type of every floating-point value: float32, or float64 within `in_float64`."""
    return _REAL.get()


@contextmanager
def in_float64() -> Iterator[None]:
    """Kernels of FP32 that are run here compute in float64, from float64 arrays to float64 arrays."""
    token = _REAL.set(np.float64)
    try:
        yield
    finally:
        _REAL.reset(token)


class Hazard(RuntimeError):
    """A kernel reads or overwrites something that the hardware does not guarantee to be there, or to be free."""


class Deadlock(RuntimeError):
    """Some warps wait for others that will never come."""


def cdiv(x: int, y: int) -> int:
    """The least integer not below x / y."""
    return -(-x // y)


def round_to(dtype: DType, x: Any) -> np.ndarray:
    """float32 values rounded to the nearest value of a storage type (ties to even), still as float32."""
    x = np.asarray(x, real())
    if dtype == F16:
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if dtype != BF16:
        return x
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1  # ties go to the even neighbour
    rounded += 0x7FFF
    rounded += bits
    rounded &= 0xFFFF0000
    result = rounded.view(np.float32)
    nan = x != x
    if nan.any():  # the carry would turn some NaNs into infinities or zeros
        return np.where(nan, np.float32(np.nan), result)
    return result


class Scope(Protocol):
    """Where an expression finds its variables and buffers."""

    def variable(self, name: str) -> Value: ...

    def load(self, expr: Load) -> Value: ...

    def array(self, name: str) -> np.ndarray: ...


class Uniform:
    """A scope of named numbers: grids, loop bounds, tile origins. arrays: the global ones that these may load from."""

    def __init__(self, values: Mapping[str, Value], arrays: Mapping[str, np.ndarray] | None = None):
        self.values = values
        self.arrays = arrays or {}

    def variable(self, name: str) -> Value:
        return self.values[name]

    def load(self, expr: Load) -> Value:
        if expr.buffer not in self.arrays:
            raise TypeError(f"{text(expr)} is not uniform")
        found = gather(self.arrays[expr.buffer], [evaluate(part, self) for part in expr.index])
        return found if found.ndim else found.item()

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]


def number(value: int | float) -> Value:
    """A run-time scalar as the kernel sees it: an int, or a float32."""
    return int(value) if isinstance(value, int | np.integer) else real()(value)


def evaluate(expr: Expr, scope: Scope) -> Value:
    """The value of an expression; both sides of a Select are computed, as a GPU thread without branches would."""
    match expr:
        case Const(value):
            return real()(value) if isinstance(value, float) else value
        case Var(name):
            return scope.variable(name)
        case Load():
            return scope.load(expr)
        case Search():
            count, rows, block = (int(evaluate(part, scope)) for part in (expr.count, expr.rows, expr.block))
            first = scope.array(expr.buffer)[:count] // rows + np.arange(count)
            return int(np.searchsorted(first, block, side="right")) - 1
        case Unary(op, x):
            return UNARY[op](evaluate(x, scope))
        case Binary():
            return _binary(expr, scope)
        case Compare(op, x, y):
            return COMPARE[op](*_alike(evaluate(x, scope), evaluate(y, scope)))
        case Cast(dtype, x):
            return _cast(dtype, evaluate(x, scope))
        case Select():
            return _select(expr, scope)
        case Random():
            return philox.element(*(evaluate(part, scope) for part in children(expr)))
    raise TypeError(f"cannot evaluate {expr!r}")


def _binary(expr: Binary, scope: Scope) -> Value:
    x, y = evaluate(expr.x, scope), evaluate(expr.y, scope)
    if isinstance(x, int) and isinstance(y, int) and expr.op in INTEGER:
        return INTEGER[expr.op](x, y)
    x, y = _alike(x, y)
    if expr.op == "/" and not _is_float(x):
        x, y = np.asarray(x, real()), np.asarray(y, real())
    operation = ARITHMETIC[expr.op]
    if _reusable(expr.x, x, y):
        return operation(x, y, out=x)
    return operation(x, y, out=y) if _reusable(expr.y, y, x) else operation(x, y)


def _reusable(expr: Expr, value: Value, other: Value) -> bool:
    """Whether the result may take the memory of an operand: a temporary of the result's shape that nobody else sees."""
    fresh = isinstance(expr, Unary | Binary) or (isinstance(expr, Cast) and expr.dtype.bytes == 2)
    if not (fresh and isinstance(value, np.ndarray) and value.dtype == real()):
        return False
    return np.shape(other) == value.shape or np.broadcast_shapes(np.shape(other), value.shape) == value.shape


def _is_float(x: Value) -> bool:
    return isinstance(x, float) or (isinstance(x, np.ndarray | np.generic) and x.dtype.kind == "f")


def _alike(x: Value, y: Value) -> tuple[Value, Value]:
    """Integers become float32 where they meet a float: NumPy alone would go to float64."""
    if _is_float(x) != _is_float(y):
        x, y = (value if _is_float(value) else np.asarray(value, real())[()] for value in (x, y))
    return x, y


def _cast(dtype: DType, x: Value) -> Value:
    return np.asarray(x).astype(np.int64) if dtype == I32 else round_to(dtype, x)


def _select(expr: Select, scope: Scope) -> Value:
    condition = evaluate(expr.condition, scope)
    if np.size(condition) <= SMALL_CONDITION:  # most masks do not depend on the head: one look saves a pass over s
        if np.all(condition):
            return evaluate(expr.x, scope)
        if not np.any(condition):
            return evaluate(expr.y, scope)
    return np.where(condition, *_alike(evaluate(expr.x, scope), evaluate(expr.y, scope)))


def gather(array: np.ndarray, index: Sequence[Value]) -> Value:
    """Elements of a global array; an index out of range, also a negative one, reads the last of its axis."""
    return array[places(array, index)]


def places(array: np.ndarray, index: Sequence[Value]) -> tuple[np.ndarray, ...]:
    """Where an index of elements is in a global array; one out of range is the last of its axis."""
    parts = zip(map(np.asarray, index), array.shape, strict=True)
    return tuple(np.where((part >= 0) & (part < size), part, size - 1) for part, size in parts)


def add_elements(array: np.ndarray, index: Sequence[Value], values: np.ndarray) -> None:
    """array[index] += values, each element of its own, rounded for integers; zeros are not added."""
    if array.dtype.kind == "i":
        values = np.rint(values).astype(array.dtype)
    *where, values = np.broadcast_arrays(*places(array, index), values)
    added = values != 0
    np.add.at(array, tuple(part[added] for part in where), values[added])


def store_elements(array: np.ndarray, index: Sequence[Value], values: np.ndarray, inside: Value) -> None:
    """array[index] = values where inside."""
    *where, values, inside = np.broadcast_arrays(*places(array, index), values, inside)
    array[tuple(part[inside] for part in where)] = values[inside]


SMALL_CONDITION = 1 << 18

ARITHMETIC: dict[str, Callable[..., Value]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "//": np.floor_divide,
    "%": np.remainder,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "min": np.minimum,
    "max": np.maximum,
    "floor_div": np.floor_divide,
    "floor_mod": np.remainder,
}

# Python integers stay Python integers: grids and loop bounds are evaluated far more often than they are large.
INTEGER: dict[str, Callable[[int, int], int]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "min": min,
    "max": max,
    "floor_div": lambda x, y: x // y,
    "floor_mod": lambda x, y: x % y,
}


def _in_float(function: Callable[[Value], Value]) -> Callable[[Value], Value]:
    """A function of one float32 argument: integers are converted first."""
    return lambda x: function(np.asarray(x, real()))[()]


UNARY: dict[str, Callable[[Value], Value]] = {
    "neg": lambda x: -x,
    "exp2": _in_float(np.exp2),
    "log": _in_float(np.log),
    "log2": _in_float(np.log2),
    "exp": _in_float(np.exp),
    "tanh": _in_float(np.tanh),
    "sigmoid": _in_float(lambda x: 1 / (1 + np.exp(-x))),
    "sin": _in_float(np.sin),
    "cos": _in_float(np.cos),
    "sqrt": _in_float(np.sqrt),
    "reciprocal": _in_float(np.reciprocal),
    "abs": abs,
    "not": np.logical_not,
}
