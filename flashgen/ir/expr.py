"""Scalar expressions: what a Map computes for one element, and what loop bounds and tile origins are made of.

    expr = Const | Var | Load(buffer, index*) | Unary | Binary | Compare | Select | Cast | Search(buffer, ...) | Random

Two variables are reserved inside a Map: `i` and `j`, the row and the column of the element within its tile.
`//` and `%` are used on non-negative operands only, where C and Python agree; `floor_div` and `floor_mod`, with a
positive divisor, on any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Union

from flashgen.ir.dtype import DType

Operand = Union["Expr", int, float]


class Expr:
    """Base of the expressions; operators build larger ones and fold integer constants."""

    def __add__(self, other: Operand) -> Expr:
        return binary("+", self, other)

    def __radd__(self, other: Operand) -> Expr:
        return binary("+", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return binary("-", self, other)

    def __rsub__(self, other: Operand) -> Expr:
        return binary("-", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return binary("*", self, other)

    def __rmul__(self, other: Operand) -> Expr:
        return binary("*", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return binary("/", self, other)

    def __rtruediv__(self, other: Operand) -> Expr:
        return binary("/", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return binary("//", self, other)

    def __mod__(self, other: Operand) -> Expr:
        return binary("%", self, other)

    def __and__(self, other: Operand) -> Expr:
        return binary("&", self, other)

    def __or__(self, other: Operand) -> Expr:
        return binary("|", self, other)

    def __neg__(self) -> Expr:
        return Unary("neg", self)

    def __lt__(self, other: Operand) -> Expr:
        return Compare("<", self, wrap(other))

    def __le__(self, other: Operand) -> Expr:
        return Compare("<=", self, wrap(other))

    def __gt__(self, other: Operand) -> Expr:
        return Compare(">", self, wrap(other))

    def __ge__(self, other: Operand) -> Expr:
        return Compare(">=", self, wrap(other))

    def equals(self, other: Operand) -> Expr:
        """`self == other` as an expression (`==` itself compares the trees)."""
        return Compare("==", self, wrap(other))


@dataclass(frozen=True)
class Const(Expr):
    value: int | float | bool


@dataclass(frozen=True)
class Var(Expr):
    name: str


@dataclass(frozen=True)
class Load(Expr):
    buffer: str
    index: tuple[Expr, ...]


@dataclass(frozen=True)
class Search(Expr):
    """The sequence in which a block of rows lies: the last k below `count` with buffer[k] // rows + k <= block.

    Blocks are so numbered that sequence k, whose rows start at buffer[k], has those from buffer[k] // rows + k on: as
    many as its own rows need at least, since floor(a + b) >= floor(a) + ceil(b) - 1.
    """

    buffer: str
    count: Expr
    rows: Expr
    block: Expr


@dataclass(frozen=True)
class Unary(Expr):
    op: str
    x: Expr


@dataclass(frozen=True)
class Binary(Expr):
    op: str
    x: Expr
    y: Expr


@dataclass(frozen=True)
class Compare(Expr):
    op: str
    x: Expr
    y: Expr


@dataclass(frozen=True)
class Select(Expr):
    condition: Expr
    x: Expr
    y: Expr


@dataclass(frozen=True)
class Cast(Expr):
    dtype: DType
    x: Expr


@dataclass(frozen=True)
class Random(Expr):
    """32 random bits, as a signed integer, that belong to one element of the scores and to nothing else.

    A word of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). Its key is the seed,
    and its counter (kv, q, sequence, offset), where elements 8 queries or 8 keys apart in 16 share one:
        kv = kv_idx // 16 * 8 + kv_idx % 8     q = q_idx // 16 * 8 + q_idx % 8
    Of its four words an element has number 2 * (q_idx // 8 % 2) + kv_idx // 8 % 2. One thread holds all four, whether
    rows of its tile are queries or keys. sequence: the number of a head among those of the whole batch.
    """

    seed_low: Expr
    seed_high: Expr
    offset: Expr
    sequence: Expr
    q_idx: Expr
    kv_idx: Expr


I, J = Var("i"), Var("j")
NEG_INF = Const(-math.inf)
INF = Const(math.inf)


def wrap(value: Operand) -> Expr:
    """`value` as an expression."""
    return value if isinstance(value, Expr) else Const(value)


def binary(op: str, x: Operand, y: Operand) -> Expr:
    """`x op y`, with integer constants folded and the neutral elements 0 and 1 dropped."""
    x, y = wrap(x), wrap(y)
    if _whole(x) and _whole(y) and op in ("+", "-", "*", "//", "%", *FUNCTIONS):
        return Const(BINARY[op](x.value, y.value))  # type: ignore[attr-defined]
    if (op in "+-" and y == Const(0)) or (op in ("*", "//") and y == Const(1)):
        return x
    if (op == "+" and x == Const(0)) or (op == "*" and x == Const(1)):
        return y
    if op in ("*", "//", "%") and isinstance(x, Const) and x.value == 0 and isinstance(x.value, int):
        return x
    if op == "+" and isinstance(y, Const) and isinstance(x, Binary) and x.op in "+-" and isinstance(x.y, Const):
        return _merge_constants(x, y)
    if op == "-" and _whole(y) and isinstance(x, Binary) and x.op in "+-" and isinstance(x.y, Const):
        return _merge_constants(x, Const(-y.value))  # type: ignore[attr-defined]
    if op == "-" and x == y and isinstance(x, Var):
        return Const(0)
    if op == "-" and isinstance(y, Binary) and y.op == "-" and y.x == x:  # x - (x - z)
        return y.y
    return Binary(op, x, y)


def _whole(expr: Expr) -> bool:
    """True for an integer constant."""
    return isinstance(expr, Const) and isinstance(expr.value, int)


def _merge_constants(x: Binary, y: Const) -> Expr:
    """(a ± c) + y with integer constants merged."""
    if not (isinstance(x.y, Const) and isinstance(x.y.value, int) and isinstance(y.value, int)):
        return Binary("+", x, y)
    total = y.value + (x.y.value if x.op == "+" else -x.y.value)
    if total < 0:
        return Binary("-", x.x, Const(-total))
    return binary("+", x.x, Const(total))


def exp2(x: Operand) -> Expr:
    """2 to the power x."""
    return Unary("exp2", wrap(x))


def log(x: Operand) -> Expr:
    """Natural logarithm."""
    return Unary("log", wrap(x))


def minimum(x: Operand, y: Operand) -> Expr:
    return binary("min", x, y)


def maximum(x: Operand, y: Operand) -> Expr:
    return binary("max", x, y)


def conjuncts(condition: Expr) -> tuple[Expr, ...]:
    """The conditions of which all hold where this one does."""
    if isinstance(condition, Binary) and condition.op == "&":
        return conjuncts(condition.x) + conjuncts(condition.y)
    return (condition,)


def select(condition: Expr, x: Operand, y: Operand) -> Expr:
    """`x` where the condition holds, else `y`."""
    return Select(condition, wrap(x), wrap(y))


def ceil_div(x: Operand, y: Operand) -> Expr:
    """The least integer not below x / y, for non-negative x and positive y."""
    return (wrap(x) + wrap(y) - 1) // wrap(y)


def load(buffer: str, *index: Expr) -> Expr:
    """The element of a buffer at an index."""
    return Load(buffer, index)


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Names of a node type's fields: asked for every node of every walk."""
    return tuple(field.name for field in fields(kind))


def children(expr: Expr) -> Iterator[Expr]:
    """The direct sub-expressions."""
    for name in _field_names(type(expr)):  # type: ignore[arg-type]
        value = getattr(expr, name)
        if isinstance(value, Expr):
            yield value
        elif isinstance(value, tuple):
            yield from value


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything under it."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def variables(expr: Expr) -> set[str]:
    """Names of the free variables."""
    return {node.name for node in walk(expr) if isinstance(node, Var)}


def by_element(expr: Expr) -> bool:
    """True for what differs from element to element of a tile."""
    return any(node in (I, J) for node in walk(expr))


def loads(expr: Expr) -> bool:
    """True for what is read from a buffer."""
    return any(isinstance(node, Load) for node in walk(expr))


def rebuild(expr: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """The same expression with `change` applied to each direct sub-expression."""
    if isinstance(expr, Binary):
        return binary(expr.op, change(expr.x), change(expr.y))
    values: dict[str, Any] = {}
    for name in _field_names(type(expr)):  # type: ignore[arg-type]
        value = getattr(expr, name)
        if isinstance(value, Expr):
            values[name] = change(value)
        elif isinstance(value, tuple):
            values[name] = tuple(change(item) for item in value)
        else:
            values[name] = value
    return type(expr)(**values)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with variables replaced."""
    if isinstance(expr, Var):
        return values.get(expr.name, expr)
    return rebuild(expr, lambda child: substitute(child, values))


def replaced(expr: Expr, old: Expr, new: Expr) -> Expr:
    """The expression with a part replaced wherever it stands."""
    return new if expr == old else rebuild(expr, lambda part: replaced(part, old, new))


FUNCTIONS = ("min", "max", "floor_div", "floor_mod")  # the operations of two operands that are written as calls

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "//": lambda x, y: x // y,
    "%": lambda x, y: x % y,
    "&": lambda x, y: x & y,
    "|": lambda x, y: x | y,
    "min": lambda x, y: min(x, y),
    "max": lambda x, y: max(x, y),
    "floor_div": lambda x, y: x // y,
    "floor_mod": lambda x, y: x % y,
}
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
    "!=": lambda x, y: x != y,
}


def evaluate(expr: Expr, values: Mapping[str, Any]) -> Any:
    """The value of a uniform (element-free) integer expression, for grids and loop bounds."""
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Var):
        return values[expr.name]
    if isinstance(expr, Binary):
        return BINARY[expr.op](evaluate(expr.x, values), evaluate(expr.y, values))
    if isinstance(expr, Compare):
        return COMPARE[expr.op](evaluate(expr.x, values), evaluate(expr.y, values))
    if isinstance(expr, Unary) and expr.op in ("neg", "abs"):
        return -evaluate(expr.x, values) if expr.op == "neg" else abs(evaluate(expr.x, values))
    if isinstance(expr, Select):
        return evaluate(expr.x if evaluate(expr.condition, values) else expr.y, values)
    raise TypeError(f"{text(expr)} is not a uniform integer expression")


# C's order, so that both spellings have the same brackets.
PRECEDENCE = {
    "|": 1,
    "&": 2,
    "==": 3,
    "!=": 3,
    "<": 4,
    "<=": 4,
    ">": 4,
    ">=": 4,
    "+": 5,
    "-": 5,
    "*": 6,
    "/": 6,
    "//": 6,
    "%": 6,
}


def text(expr: Expr, parent: int = 0) -> str:
    """Canonical text: the identity of the expression in dumps and keys."""
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Var):
        return expr.name
    if isinstance(expr, Load):
        return f"{expr.buffer}[{', '.join(text(index) for index in expr.index)}]"
    if isinstance(expr, Search):
        return f"search({expr.buffer}, {text(expr.count)}, {text(expr.rows)}, {text(expr.block)})"
    if isinstance(expr, Unary):
        return f"{expr.op}({text(expr.x)})"
    if isinstance(expr, Cast):
        return f"{expr.dtype}({text(expr.x)})"
    if isinstance(expr, Select):
        return f"select({text(expr.condition)}, {text(expr.x)}, {text(expr.y)})"
    if isinstance(expr, Random):
        return f"random({', '.join(text(part) for part in children(expr))})"
    if isinstance(expr, Binary) and expr.op in FUNCTIONS:
        return f"{expr.op}({text(expr.x)}, {text(expr.y)})"
    assert isinstance(expr, Binary | Compare)
    level = PRECEDENCE[expr.op]
    body = f"{text(expr.x, level)} {expr.op} {text(expr.y, level + 1)}"
    return f"({body})" if level < parent else body
