"""Signs that a mask leaves: the distance of a key that a causal query sees is not negative."""

from __future__ import annotations

from collections.abc import Iterable

from flashgen.calculus.intervals import Term, affine
from flashgen.ir.expr import Binary, Cast, Compare, Const, Expr, Unary, variables

Sum = tuple[dict[str, Term], int]  # an integer as a sum of variables and a constant


def without_signs(expr: Expr, conditions: Iterable[Expr], integers: set[str], score: str) -> Expr:
    """abs(x) as x or -x, where the conditions under which an element is seen leave x one sign.

    Only where a term of the sum is a multiple of it, and has no part of the score: a hidden element then has another
    number there, which no derivative by the score sees, and which the mask replaces.
    integers: the variables of which sums are understood.
    """
    facts = [fact for condition in conditions if (fact := _not_negative(condition, integers)) is not None]

    def of_sum(expr: Expr) -> Expr:
        if isinstance(expr, Binary) and expr.op in "+-":
            return Binary(expr.op, of_sum(expr.x), of_sum(expr.y))
        return expr if score in variables(expr) else multiple(expr)

    def multiple(expr: Expr) -> Expr:
        match expr:
            case Binary("*", x, y):
                return Binary("*", multiple(x), multiple(y))
            case Cast(dtype, Unary("abs") as part):
                return Cast(dtype, multiple(part))
            case Unary("abs", x):
                return _of_one_sign(x, facts, integers) or expr
        return expr

    return of_sum(expr) if facts else expr


def _of_one_sign(x: Expr, facts: list[Sum], integers: set[str]) -> Expr | None:
    """|x| without an absolute value, where the facts allow it: it is one of them, or that and a positive number."""
    other = Binary("-", x.y, x.x) if isinstance(x, Binary) and x.op == "-" else Binary("-", Const(0), x)
    for signed in (x, other):
        found = _sum(signed, integers)
        if found is not None and any(found[0] == fact and found[1] >= least for fact, least in facts):
            return signed
    return None


def _not_negative(condition: Expr, integers: set[str]) -> Sum | None:
    """What is not negative where a comparison of integers holds."""
    match condition:
        case Compare("<=", x, y) | Compare(">=", y, x):
            return _sum(Binary("-", y, x), integers)
        case Compare("<", x, y) | Compare(">", y, x):
            return _sum(Binary("-", Binary("-", y, x), Const(1)), integers)
    return None


def _sum(expr: Expr, integers: set[str]) -> Sum | None:
    """The expression as a sum of integers; None where it is none."""
    try:
        terms, rest = affine(expr, integers)
    except ValueError:
        return None
    if not isinstance(rest, Const) or type(rest.value) is not int or any(x.factor != Const(1) for x in terms.values()):
        return None
    return terms, rest.value
