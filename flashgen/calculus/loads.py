"""What a score function loads from arrays: its derivative by an element, and what the index of that depends on."""

from __future__ import annotations

from flashgen.calculus.derivatives import derivative
from flashgen.calculus.intervals import affine
from flashgen.ir.expr import Expr, Load, Var, children, replaced, variables, walk

_ELEMENT = Var("the element")


def loads_of(expr: Expr, array: str) -> tuple[Load, ...]:
    """The elements of an array that an expression loads, each once, in the order of their first use."""
    return tuple(dict.fromkeys(node for node in walk(expr) if isinstance(node, Load) and node.buffer == array))


def derivative_by_load(expr: Expr, load: Load) -> Expr:
    """d expr / d load, where other elements of the same array count as constants."""
    return replaced(derivative(replaced(expr, load, _ELEMENT), _ELEMENT.name), _ELEMENT, load)


def by_distance(expr: Expr, one: str, other: str) -> bool:
    """True where an integer expression depends on two variables by their difference alone."""
    found = variables(expr) & {one, other}
    if not found:
        return True
    if isinstance(expr, Var | Load):
        return isinstance(expr, Load) and all(by_distance(part, one, other) for part in expr.index)
    try:
        terms, _ = affine(expr, {one, other})
    except ValueError:
        return all(by_distance(part, one, other) for part in children(expr))
    if len(terms) < 2:
        return False
    return terms[one].sign == -terms[other].sign and terms[one].factor == terms[other].factor
