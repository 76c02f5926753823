"""Tracing: a mask or score function of plain Python runs once, on stand-ins for numbers, and leaves an expression.

What such a function is handed are `Value`s. Arithmetic on them is noted instead of done; what Python would have to know
the number for (`if`, `and`, a loop, `float()`) raises with the user's file and line. The text of the expression is the
identity of the function, with the types of the arrays that it reads: in a `Spec`, and so in every cache.

Arrays are arguments behind the others. Their types must be known, as integers and numbers have other arithmetic; where
they are not given, those are assumed with which the function can be traced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

from flashgen.ir.expr import Const, Expr, Load, Var, rebuild, substitute, text, variables
from flashgen.spec import Array, Function
from flashgen.trace.arrays import DTYPES, DTypes, Elements, assumptions, parameters
from flashgen.trace.value import BOOL, FLOAT, INT, Value, real, value

__all__ = ["DTYPES", "DTypes", "behind", "both", "mask", "renamed", "score"]
MASK_ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
SCORE_ARGUMENTS = ("score", *MASK_ARGUMENTS)
SIZES = ("seqlen_q", "seqlen_k", "heads")


def mask(function: Callable, dtypes: DTypes | None = None) -> Function | None:
    """The trace of mask_mod(b, h, q_idx, kv_idx, *arrays) -> True where the query sees the key; None where it always
    does. dtypes: those of the arrays."""
    found, arrays = _traced(function, "mask", MASK_ARGUMENTS, dtypes)
    if found.kind != BOOL:
        raise TypeError(f"mask_mod returned {found.kind}, {text(found.expr)}; compare it with something")
    return None if found.expr == Const(True) and not arrays else _named(function, "mask", found.expr, arrays)


def score(function: Callable, dtypes: DTypes | None = None) -> Function | None:
    """The trace of score_mod(score, b, h, q_idx, kv_idx, *arrays) -> the score in its place; None where it is the same.
    dtypes: those of the arrays."""
    found, arrays = _traced(function, "score", SCORE_ARGUMENTS, dtypes)
    expr = real(found).expr
    return None if expr == Var("score") and not arrays else _named(function, "score", expr, arrays)


def both(one: Function | None, other: Function | None) -> Function | None:
    """The mask that shows what both show."""
    if one is None or other is None:
        return one or other
    return _made(f"{one.name}_{other.name}", one.expr & other.expr, one.arrays + other.arrays)


def behind(first: Function | None, then: Function | None) -> Function | None:
    """The score function that applies one to what another gives."""
    if first is None or then is None:
        return first or then
    expr = substitute(then.expr, {"score": first.expr})
    return _made(f"{first.name}_{then.name}", expr, first.arrays + then.arrays)


def renamed(function: Function, name: str) -> Function:
    """The same function, with another name for the one array that it reads."""
    (array,) = function.arrays

    def change(expr: Expr) -> Expr:
        expr = rebuild(expr, change)
        return Load(name, expr.index) if isinstance(expr, Load) else expr

    return _made(function.name, change(function.expr), (replace(array, name=name),))


Arrays = tuple[Array, ...]


def _traced(function: Callable, kind: str, arguments: tuple[str, ...], dtypes: DTypes | None) -> tuple[Value, Arrays]:
    """What the function gives, and the arrays that it reads, of the types given or else assumed."""
    names = parameters(function, kind, arguments)
    first_error = None
    for assumed in assumptions(kind, len(names)) if dtypes is None else (dtypes,):
        elements = [Elements(name, dtype) for name, dtype in zip(names, assumed, strict=True)]
        try:
            return _run(function, kind, arguments, elements), tuple(item.array(kind) for item in elements)
        except TypeError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _run(function: Callable, kind: str, arguments: tuple[str, ...], arrays: list[Elements]) -> Value:
    values = [Value(Var(item), FLOAT if item == "score" else INT) for item in arguments]
    found = value(function(*values, *arrays))
    foreign = variables(found.expr) - {*arguments, *SIZES}
    if foreign:
        raise ValueError(f"{kind}_mod uses {', '.join(sorted(foreign))} of another function; use its own arguments")
    return found


def _named(function: Callable, kind: str, expr: Expr, arrays: Arrays) -> Function:
    """By the name that a function of this package has for files, and the types of what it reads; else by its text."""
    short = hashlib.sha256(repr((text(expr), *arrays) if arrays else text(expr)).encode()).hexdigest()[:8]
    name = getattr(function, "file_name", None)
    return _made("_".join([name, *(item.dtype.cuda for item in arrays)]) if name else f"{kind}_{short}", expr, arrays)


def _made(name: str, expr: Expr, arrays: Arrays) -> Function:
    return Function(name, text(expr), expr, arrays)
