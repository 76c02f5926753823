"""Expressions as C."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flashgen.ir.dtype import F32
from flashgen.ir.expr import (
    FUNCTIONS,
    PRECEDENCE,
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    J,
    Load,
    Random,
    Search,
    Select,
    Unary,
    Var,
    children,
    text,
    variables,
)

_C_OPERATORS = {"//": "/", "&": "&&", "|": "||"}
_BRANCHLESS = {"//": "/"}
# Those of templates/device/common.cuh have no branch, which the products of wgmma would have to be waited for around.
_FUNCTIONS = {
    "exp2": "exp2_approx",
    "log": "logf",
    "neg": "-",
    "abs": "absolute",
    "log2": "log2_approx",
    "tanh": "tanh_accurate",
    "sigmoid": "sigmoid",
    "sin": "sin_reduced",
    "cos": "cos_reduced",
    "sqrt": "sqrt_approx",
    "reciprocal": "reciprocal",
}
_SPECIAL = {"exp2", "log", "log2", "tanh", "sigmoid", "sin", "cos", "sqrt", "reciprocal"}
_SELECTPRECEDENCE = 0
_ATOM = 9


@dataclass(frozen=True)
class Fused(Expr):
    """x * y + z in one instruction: else products that no step changes are computed ahead, and take a register each."""

    x: Expr
    y: Expr
    z: Expr


Name = Callable[[str], str]
Element = Callable[[Load], str]


def no_element(load: Load) -> str:
    """The `element` of uniform expressions that load nothing."""
    raise ValueError(f"{load.buffer} is loaded in a uniform expression")


def c_text(expr: Expr, name: Name, element: Element = no_element, parent: int = 0, branch: bool = True) -> str:
    """The expression in C; `name` spells a variable and `element` a loaded element.

    branch: && and ||, which leave out their second operand; else & and |, of which a compiler makes no branch, and
    `select` where it would make one of ?: to leave out a special function.
    """

    def spelled(part: Expr, level: int = 0) -> str:
        return c_text(part, name, element, level, branch)

    body, level = _spell(expr, name, element, spelled, _C_OPERATORS if branch else _BRANCHLESS)
    return f"({body})" if level < parent else body


def _spell(
    expr: Expr, name: Name, element: Element, spelled: Callable[..., str], operators: dict[str, str]
) -> tuple[str, int]:
    """Text and precedence."""
    if isinstance(expr, Const):
        return _constant(expr.value), _ATOM
    if isinstance(expr, Var):
        word = name(expr.name)
        return word, _ATOM if word.replace("_", "").replace(".", "").isalnum() or word.endswith(")") else 5
    if isinstance(expr, Load):
        return element(expr), _ATOM
    if isinstance(expr, Search):
        return f"sequence_of(args.{expr.buffer}, {', '.join(map(spelled, (expr.count, expr.rows, expr.block)))})", _ATOM
    if isinstance(expr, Cast) and expr.dtype == F32:
        return f"float({spelled(expr.x)})", _ATOM
    if isinstance(expr, Cast):
        raise ValueError(f"{text(expr)} is rounded inside of an expression; only a whole tile is packed")
    if isinstance(expr, Unary):
        return f"{_FUNCTIONS[expr.op]}({spelled(expr.x)})", _ATOM
    if isinstance(expr, Fused):
        return f"fmaf({', '.join(spelled(part) for part in children(expr))})", _ATOM
    if isinstance(expr, Random):
        return f"random_word({', '.join(spelled(part) for part in children(expr))})", _ATOM
    if isinstance(expr, Select):
        # What a row alone decides is no matter of the products.
        special = _is_special(expr.x) or _is_special(expr.y)
        if operators is _BRANCHLESS and special and J.name in variables(expr):
            return f"select({', '.join(map(spelled, (expr.condition, expr.x, expr.y)))})", _ATOM
        condition, *either = (spelled(part, 1) for part in (expr.condition, expr.x, expr.y))
        return f"{condition} ? {' : '.join(either)}", _SELECTPRECEDENCE
    assert isinstance(expr, Binary | Compare)
    if expr.op in FUNCTIONS:
        return f"{expr.op}({spelled(expr.x)}, {spelled(expr.y)})", _ATOM
    level = PRECEDENCE[expr.op]
    return f"{spelled(expr.x, level)} {operators.get(expr.op, expr.op)} {spelled(expr.y, level + 1)}", level


def _is_special(expr: Expr) -> bool:
    """True for a number that takes a special function; a truth that is made of one is none."""
    if isinstance(expr, Compare) or (isinstance(expr, Binary) and expr.op in ("&", "|")):
        return False
    return (isinstance(expr, Unary) and expr.op in _SPECIAL) or any(map(_is_special, children(expr)))


def _constant(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INF" if value > 0 else "-INF"
    return f"{value!r}f"
