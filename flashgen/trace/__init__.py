"""Tracing: a mask or score function of plain Python runs once, on stand-ins for numbers, and leaves an expression.

What such a function is handed are `Value`s. Arithmetic on them is noted instead of done; what Python would have to know
the number for (`if`, `and`, a loop, `float()`) raises with the user's file and line. The text of the expression is the
identity of the function: in a `Spec`, and so in every cache.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable

from flashgen.ir.expr import Const, Expr, Var, substitute, text, variables
from flashgen.spec import Function
from flashgen.trace.value import BOOL, FLOAT, INT, Value, real, value

MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
SIZES = ("seqlen_q", "seqlen_k", "heads")


def mask(function: Callable, name: str = "mask_mod") -> Function | None:
    """The trace of mask_mod(b, h, q_idx, kv_idx) -> True where the query sees the key; None where it always does."""
    found = _run(function, name, MASK_ARGUMENTS)
    if found.kind != BOOL:
        raise TypeError(f"{name} returned {found.kind}, {text(found.expr)}; compare it with something")
    return None if found.expr == Const(True) else _named(function, "mask", found.expr)


def score(function: Callable, name: str = "score_mod") -> Function | None:
    """The trace of score_mod(score, b, h, q_idx, kv_idx) -> the score in its place; None where it is the same."""
    found = real(_run(function, name, SCORE_ARGUMENTS))
    return None if found.expr == Var("score") else _named(function, "score", found.expr)


def both(one: Function | None, other: Function | None) -> Function | None:
    """The mask that shows what both show."""
    if one is None or other is None:
        return one or other
    return _made(f"{one.name}_{other.name}", one.expr & other.expr)


def behind(first: Function | None, then: Function | None) -> Function | None:
    """The score function that applies one to what another gives."""
    if first is None or then is None:
        return first or then
    return _made(f"{first.name}_{then.name}", substitute(then.expr, {"score": first.expr}))


def _run(function: Callable, name: str, arguments: tuple[str, ...]) -> Value:
    if not callable(function):
        raise TypeError(f"{name} = {function!r} must be a function of {', '.join(arguments)}")
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is called with {', '.join(arguments)}; give it these arguments") from None
    values = [Value(Var(item), FLOAT if item == "score" else INT) for item in arguments]
    found = value(function(*values))
    foreign = variables(found.expr) - {*arguments, *SIZES}
    if foreign:
        raise ValueError(f"{name} uses {', '.join(sorted(foreign))} of another function; use its own arguments")
    return found


def _named(function: Callable, kind: str, expr: Expr) -> Function:
    """By the name that a function of this package has for files; else by its text."""
    short = hashlib.sha256(text(expr).encode()).hexdigest()[:8]
    return _made(getattr(function, "file_name", f"{kind}_{short}"), expr)


def _made(name: str, expr: Expr) -> Function:
    return Function(name, text(expr), expr)
