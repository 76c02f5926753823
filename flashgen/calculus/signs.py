"""Signs that a mask leaves: the distance of a key that a causal query sees is not negative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from flashgen.ir.expr import Binary, Cast, Compare, Const, Expr, Unary, Var, variables

ONE = Const(1)
Sum = Counter[Expr]  # an integer as a sum: how often each variable is in it, and its constant under ONE


def without_signs(expr: Expr, conditions: Iterable[Expr], integers: Collection[str], score: str) -> Expr:
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


def _of_one_sign(x: Expr, facts: list[Sum], integers: Collection[str]) -> Expr | None:
    """|x| without an absolute value, where the facts allow it."""
    other = Binary("-", x.y, x.x) if isinstance(x, Binary) and x.op == "-" else Binary("-", Const(0), x)
    for signed in (x, other):
        found = _sum(signed, integers)
        if found is not None and any(_at_least(found, fact) for fact in facts):
            return signed
    return None


def _at_least(found: Sum, fact: Sum) -> bool:
    """Whether one sum is another, or that and a positive number."""
    rest = {part: found[part] - fact[part] for part in {*found, *fact}}
    return rest.pop(ONE, 0) >= 0 and not any(rest.values())


def _not_negative(condition: Expr, integers: Collection[str]) -> Sum | None:
    """What is not negative where a comparison of integers holds."""
    match condition:
        case Compare("<=", x, y) | Compare(">=", y, x):
            return _sum(Binary("-", y, x), integers)
        case Compare("<", x, y) | Compare(">", y, x):
            return _sum(Binary("-", Binary("-", y, x), ONE), integers)
    return None


def _sum(expr: Expr, integers: Collection[str], sign: int = 1) -> Sum | None:
    """The expression as a sum; None where it is none of integers."""
    match expr:
        case Const(int() as value) if not isinstance(value, bool):
            return Sum({ONE: sign * value})
        case Var(name) if name in integers:
            return Sum({expr: sign})
        case Binary("+" | "-" as op, x, y):
            left, right = _sum(x, integers, sign), _sum(y, integers, sign if op == "+" else -sign)
            if left is None or right is None:
                return None
            left.update(right)
            return left
    return None
