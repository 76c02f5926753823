"""The functions that masks and scores are written with, and the sizes that they may use beside their arguments.

Of plain numbers they give plain numbers, so that constants can be computed with them.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

from flashgen.ir.expr import BINARY, Const, Select, Var, binary
from flashgen.trace.value import BOOL, INT, Value, alike, call, logic, negation, truth, value

seqlen_q, seqlen_k, heads = (Value(Var(name), INT) for name in ("seqlen_q", "seqlen_k", "heads"))


def where(condition: Any, x: Any, y: Any) -> Any:
    """`x` where the condition holds, else `y`."""
    chosen = truth(condition, "flashgen.where").expr
    one, other = value(x), value(y)
    if one.kind == other.kind == BOOL:
        return logic("|", logic("&", Value(chosen, BOOL), one), logic("&", Value(negation(chosen), BOOL), other))
    one, other = alike(one, other)
    if isinstance(chosen, Const):
        return one if chosen.value else other
    return Value(Select(chosen, one.expr, other.expr), one.kind)


def exp(x: Any) -> Any:
    """e to the power x."""
    return exp2(x * math.log2(math.e)) if isinstance(x, Value) else math.exp(x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return call("log2", x) * math.log(2.0) if isinstance(x, Value) else math.log(x)


def exp2(x: Any) -> Any:
    """2 to the power x."""
    return call("exp2", x) if isinstance(x, Value) else 2.0**x


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, to 2^-19 of its value."""
    return call("tanh", x) if isinstance(x, Value) else math.tanh(x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return call("sigmoid", x) if isinstance(x, Value) else 1.0 / (1.0 + math.exp(-x))


def sin(x: Any) -> Any:
    """The sine of an angle in radians, within 2^-20 for angles up to some thousands."""
    return call("sin", x) if isinstance(x, Value) else math.sin(x)


def cos(x: Any) -> Any:
    """The cosine of an angle in radians, within 2^-20 for angles up to some thousands."""
    return call("cos", x) if isinstance(x, Value) else math.cos(x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return call("sqrt", x) if isinstance(x, Value) else math.sqrt(x)


def minimum(x: Any, y: Any) -> Any:
    """The smaller one."""
    return _function("min", x, y)


def maximum(x: Any, y: Any) -> Any:
    """The larger one."""
    return _function("max", x, y)


def abs(x: Any) -> Any:
    """The absolute value."""
    return builtins.abs(x)


def _function(op: str, x: Any, y: Any) -> Any:
    if not isinstance(x, Value) and not isinstance(y, Value):
        return BINARY[op](x, y)
    x, y = alike(x, y)
    return Value(binary(op, x.expr, y.expr), x.kind)
