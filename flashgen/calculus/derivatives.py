"""Derivatives of score functions, and where their values stay finite."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashgen.ir.expr import NEG_INF, Binary, Cast, Compare, Const, Expr, Select, Unary, Var, text, variables, walk


def derivative(expr: Expr, name: str) -> Expr:
    """d expr / d name. Where two branches meet it is that of the first, of abs at 0 it is 0."""
    if name not in variables(expr):
        return Const(0.0)
    match expr:
        case Var():
            return Const(1.0)
        case Cast(_, x):
            return derivative(x, name)
        case Select(condition, x, y):
            return _either(condition, derivative(x, name), derivative(y, name))
        case Binary("+", x, y):
            return _plus(derivative(x, name), derivative(y, name))
        case Binary("-", x, y):
            return _plus(derivative(x, name), _times(derivative(y, name), Const(-1.0)))
        case Binary("*", x, y):
            return _plus(_times(derivative(x, name), y), _times(derivative(y, name), x))
        case Binary("min" | "max" as op, x, y):
            return _either(Compare("<=" if op == "min" else ">=", x, y), derivative(x, name), derivative(y, name))
        case Unary(op, x):
            return _times(_SLOPES[op](x, expr), derivative(x, name))
    raise ValueError(f"{text(expr)} has no derivative that is known")


# Of a function y = f(x): f'(x) from x and y.
_SLOPES: dict[str, Callable[[Expr, Expr], Expr]] = {
    "exp2": lambda x, y: y * math.log(2.0),
    "log2": lambda x, y: Unary("reciprocal", x) * (1.0 / math.log(2.0)),
    "tanh": lambda x, y: 1.0 - y * y,
    "sigmoid": lambda x, y: y * (1.0 - y),
    "sin": lambda x, y: Unary("cos", x),
    "cos": lambda x, y: 0.0 - Unary("sin", x),
    "sqrt": lambda x, y: Unary("reciprocal", y) * 0.5,
    "reciprocal": lambda x, y: 0.0 - y * y,
    "abs": lambda x, y: Select(x > 0.0, Const(1.0), Select(x < 0.0, Const(-1.0), Const(0.0))),
}


def _plus(x: Expr, y: Expr) -> Expr:
    if isinstance(x, Const) and isinstance(y, Const):
        return Const(x.value + y.value)
    return x if y == Const(0) else y if x == Const(0) else x + y


def _times(x: Expr, y: Expr) -> Expr:
    if isinstance(x, Const) and isinstance(y, Const):
        return Const(x.value * y.value)
    if Const(0) in (x, y):
        return Const(0.0)
    match x, y:
        case Binary("*", inner, Const(factor)), Const(other):
            return _times(inner, Const(factor * other))
    return x if y == Const(1) else y if x == Const(1) else x * y


def _either(condition: Expr, x: Expr, y: Expr) -> Expr:
    return x if x == y else Select(condition, x, y)


# Functions whose values are finite for every finite argument.
_TAME = ("neg", "abs", "tanh", "sigmoid", "sin", "cos")


def tame(expr: Expr, elements: set[str], negative_infinity: bool = True) -> bool:
    """True where the value is finite, or else -inf, for finite values of `elements`, in or out of their range.

    What does not depend on them is the same for elements that exist, and is not looked at. -inf itself may be what a
    score becomes, by a sum or a choice.
    """
    if isinstance(expr, Const) or not variables(expr) & elements:
        infinite = any(isinstance(node, Const) and not math.isfinite(node.value) for node in walk(expr))
        return not infinite or (negative_infinity and expr == NEG_INF)
    match expr:
        case Var():
            return True
        case Select(_, x, y) | Binary("+" | "min" | "max", x, y):
            return tame(x, elements, negative_infinity) and tame(y, elements, negative_infinity)
        case Binary("-", x, y):
            return tame(x, elements, negative_infinity) and tame(y, elements, False)
        case Binary("*" | "floor_div" | "floor_mod", x, y):
            return tame(x, elements, False) and tame(y, elements, False)
        case Cast(_, x):
            return tame(x, elements, False)
        case Unary(op, x):
            return op in _TAME and tame(x, elements, False)
    return False
