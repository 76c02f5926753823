"""What stands for numbers while a function is traced, and the rules of arithmetic on it."""

from __future__ import annotations

import math
import numbers
import sys
from pathlib import Path
from typing import Any

from flashgen.ir.dtype import F32
from flashgen.ir.expr import BINARY, COMPARE, Binary, Cast, Compare, Const, Expr, Select, Unary, binary, text

PACKAGE = str(Path(__file__).parents[1])
LARGEST = 2**31 - 1  # integers in a kernel have 32 bits
BOOL, INT, FLOAT = "a truth value", "an integer", "a number"
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


class Value:
    """What stands for a number of each element of the scores while a function is traced."""

    __slots__ = ("expr", "kind")
    __array_ufunc__ = None  # a NumPy number on the left leaves the operation to this class
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expr: Expr, kind: str) -> None:
        self.expr = expr
        self.kind = kind

    def __repr__(self) -> str:
        return f"<traced {text(self.expr)}>"

    def _refuse(self, what: str, instead: str) -> TypeError:
        return TypeError(f"{line()}: {what} of {text(self.expr)} is not known while it is traced; {instead}")

    def __bool__(self) -> bool:
        raise self._refuse("the truth", "use flashgen.where, &, | and ~ in place of if, and, or, not, min and max")

    def __float__(self) -> float:
        raise self._refuse("the value", "use flashgen.exp and so on in place of math.exp")

    def __int__(self) -> int:
        raise self._refuse("the value", "use // in place of int()")

    def __index__(self) -> int:
        raise self._refuse("the value", "it can neither be an index nor count the rounds of a loop")

    def __iter__(self) -> Any:
        raise self._refuse("the length", "it cannot be iterated over")

    def __add__(self, other: Any) -> Value:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Value:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Value:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Value:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Value:
        return _arithmetic("*", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _quotient(self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return _quotient(other, self)

    def __floordiv__(self, other: Any) -> Value:
        return _whole("floor_div", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _whole("floor_div", other, self)

    def __mod__(self, other: Any) -> Value:
        return _whole("floor_mod", self, other)

    def __rmod__(self, other: Any) -> Value:
        return _whole("floor_mod", other, self)

    def __pow__(self, exponent: Any) -> Value:
        return _power(self, exponent)

    def __rpow__(self, base: Any) -> Value:
        if not isinstance(base, int | float) or base <= 0:
            raise TypeError(f"{line()}: {base!r} ** {text(self.expr)} has no positive base")
        return call("exp2", self * math.log2(base))

    def __neg__(self) -> Value:
        return _arithmetic("-", 0, self)  # affine, where calculus looks for that

    def __abs__(self) -> Value:
        x = _number(self)
        return Value(Unary("abs", x.expr), x.kind)

    def __and__(self, other: Any) -> Value:
        return logic("&", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return logic("|", self, other)

    __ror__ = __or__

    def __invert__(self) -> Value:
        return Value(negation(truth(self, "~").expr), BOOL)

    def __lt__(self, other: Any) -> Value:
        return _comparison("<", self, other)

    def __le__(self, other: Any) -> Value:
        return _comparison("<=", self, other)

    def __gt__(self, other: Any) -> Value:
        return _comparison(">", self, other)

    def __ge__(self, other: Any) -> Value:
        return _comparison(">=", self, other)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return _comparison("==", self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return _comparison("!=", self, other)


def line() -> str:
    """The file and line of the innermost caller outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def value(x: Any) -> Value:
    """What a function may mix: values, and Python or NumPy numbers."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(Const(x), BOOL)
    if isinstance(x, numbers.Integral):
        if abs(int(x)) > LARGEST:
            raise ValueError(f"{line()}: {x} exceeds the 32 bits of a kernel's integers; use a smaller one")
        return Value(Const(int(x)), INT)
    if isinstance(x, numbers.Real):
        return Value(Const(float(x)), FLOAT)
    kind = type(x).__name__
    raise TypeError(f"{line()}: a {kind} cannot be part of a mask or score function; use its arguments and numbers")


def _number(x: Any) -> Value:
    """True and False count as 1 and 0."""
    x = value(x)
    return Value(Select(x.expr, Const(1), Const(0)), INT) if x.kind == BOOL else x


def real(x: Any) -> Value:
    x = value(x)
    if x.kind == BOOL:
        return Value(Select(x.expr, Const(1.0), Const(0.0)), FLOAT)
    if x.kind == FLOAT:
        return x
    return Value(Const(float(x.expr.value)) if isinstance(x.expr, Const) else Cast(F32, x.expr), FLOAT)


def alike(x: Any, y: Any) -> tuple[Value, Value]:
    x, y = _number(x), _number(y)
    return (x, y) if x.kind == y.kind else (real(x), real(y))


def truth(x: Any, operation: str) -> Value:
    x = value(x)
    if x.kind != BOOL:
        raise TypeError(f"{line()}: {operation} of {text(x.expr)}, {x.kind}; compare it with something first")
    return x


def _arithmetic(op: str, x: Any, y: Any) -> Value:
    x, y = alike(x, y)
    if isinstance(x.expr, Const) and isinstance(y.expr, Const):
        return Value(Const(BINARY[op](x.expr.value, y.expr.value)), x.kind)
    if isinstance(x.expr, Const) and op in "+*":
        x, y = y, x  # where calculus looks for a factor
    return Value(binary(op, x.expr, y.expr), x.kind)


def _quotient(x: Any, y: Any) -> Value:
    """By a reciprocal: the division of C is exact, slow, and branches."""
    x, y = real(x), real(y)
    if not isinstance(y.expr, Const):
        return _arithmetic("*", x, call("reciprocal", y))
    if y.expr.value == 0:
        raise ZeroDivisionError(f"{line()}: {text(x.expr)} is divided by zero")
    return _arithmetic("*", x, 1.0 / y.expr.value)


def _whole(op: str, x: Any, y: Any) -> Value:
    x, y = _number(x), _number(y)
    if FLOAT in (x.kind, y.kind):
        raise TypeError(f"{line()}: // and % are of integers, not of {text(x.expr)} and {text(y.expr)}; use /")
    if isinstance(y.expr, Const) and y.expr.value <= 0:
        raise ValueError(f"{line()}: // and % take a positive divisor, not {y.expr.value}")
    return Value(binary(op, x.expr, y.expr), INT)


def _power(x: Value, exponent: Any) -> Value:
    if exponent == 0.5:
        return call("sqrt", x)
    if not isinstance(exponent, int) or not 1 <= exponent <= 8:
        raise TypeError(f"{line()}: {text(x.expr)} ** {exponent!r}: exponents are 0.5 and 1 to 8; use exp and log")
    result = x
    for _ in range(exponent - 1):
        result = result * x
    return result


def logic(op: str, x: Any, y: Any) -> Value:
    x, y = truth(x, op), truth(y, op)
    for one, other in ((x, y), (y, x)):
        if isinstance(one.expr, Const):
            return other if one.expr.value == (op == "&") else one
    return Value(binary(op, x.expr, y.expr), BOOL)


def negation(expr: Expr) -> Expr:
    """The opposite of a condition: only comparisons are negated, so that calculus meets & and | alone."""
    if isinstance(expr, Compare):
        return Compare(_NEGATED[expr.op], expr.x, expr.y)
    if isinstance(expr, Const):
        return Const(not expr.value)
    assert isinstance(expr, Binary)
    return Binary("|" if expr.op == "&" else "&", negation(expr.x), negation(expr.y))


def _comparison(op: str, x: Any, y: Any) -> Value:
    x, y = alike(x, y)
    if isinstance(x.expr, Const) and isinstance(y.expr, Const):
        return Value(Const(bool(COMPARE[op](x.expr.value, y.expr.value))), BOOL)
    return Value(Compare(op, x.expr, y.expr), BOOL)


def call(op: str, x: Any) -> Value:
    return Value(Unary(op, real(x).expr), FLOAT)
