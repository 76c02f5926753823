"""Expressions as C."""

from __future__ import annotations

import math
from collections.abc import Callable

from flashgen.ir.expr import Binary, Cast, Compare, Const, Expr, Load, Select, Unary, Var, text

_C_OPERATORS = {"//": "/", "&": "&&", "|": "||"}
_PRECEDENCE = {
    "|": 1,
    "&": 2,
    "==": 3,
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
_FUNCTIONS = {"exp2": "exp2_approx", "log": "logf", "neg": "-"}
_SELECT_PRECEDENCE = 0
_ATOM = 9

Name = Callable[[str], str]
Element = Callable[[Load], str]


def no_element(load: Load) -> str:
    """The `element` of uniform expressions, which load nothing."""
    raise ValueError(f"{load.buffer} is loaded in a uniform expression")


def c_text(expr: Expr, name: Name, element: Element = no_element, parent: int = 0) -> str:
    """The expression in C; `name` spells a variable and `element` a loaded element."""
    body, level = _spell(expr, name, element)
    return f"({body})" if level < parent else body


def _spell(expr: Expr, name: Name, element: Element) -> tuple[str, int]:
    """Text and precedence."""
    if isinstance(expr, Const):
        return _constant(expr.value), _ATOM
    if isinstance(expr, Var):
        spelled = name(expr.name)
        return spelled, _ATOM if spelled.replace("_", "").replace(".", "").isalnum() or spelled.endswith(")") else 5
    if isinstance(expr, Load):
        return element(expr), _ATOM
    if isinstance(expr, Cast):
        raise ValueError(f"{text(expr)} is rounded inside of an expression; only a whole tile is packed")
    if isinstance(expr, Unary):
        return f"{_FUNCTIONS[expr.op]}({c_text(expr.x, name, element)})", _ATOM
    if isinstance(expr, Select):
        condition = c_text(expr.condition, name, element, 1)
        branches = (c_text(branch, name, element, 1) for branch in (expr.x, expr.y))
        return f"{condition} ? {' : '.join(branches)}", _SELECT_PRECEDENCE
    assert isinstance(expr, Binary | Compare)
    if expr.op in ("min", "max"):
        return f"{expr.op}({c_text(expr.x, name, element)}, {c_text(expr.y, name, element)})", _ATOM
    level = _PRECEDENCE[expr.op]
    left = c_text(expr.x, name, element, level)
    right = c_text(expr.y, name, element, level + 1)
    return f"{left} {_C_OPERATORS.get(expr.op, expr.op)} {right}", level


def _constant(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "INF" if value > 0 else "-INF"
    return f"{value!r}f"
