"""Exponents as one sum: what a score function adds, the offset and the change to powers of two.

Where the maximum is guessed a step knows its offset before its scores. exp2((score * scale + more) * log2(e) - offset)
is then computed as exp2(score * (scale * log2(e)) + (more * log2(e) - offset)), a fused multiplication and addition for
the score and one for each part of `more` that differs by row and column. What differs by row alone is one number for
all columns: of ALiBi's slope * (row - column) one instruction an element is left of three.
"""

from __future__ import annotations

from functools import reduce
from operator import mul

from flashgen.ir.expr import Binary, Const, Expr, I, J, Unary, by_element, load, walk

SCORE = load("s", I, J)
Signed = tuple[int, Expr]


def exponent(expr: Expr, factor: Expr, offset: Expr) -> Expr:
    """expr * factor - offset as a sum: first what differs by row alone, then the rest, the score last."""
    of_row: list[Signed] = []
    others: list[Signed] = []
    scores: list[Signed] = []
    for sign, term in _terms(expr):
        same, varying = _factors(term)
        weight = reduce(mul, same, factor)
        if SCORE in walk(term):
            scores.append((sign, varying * weight))
            continue
        for inner, part in _terms(varying):
            (others if J in walk(part) else of_row).append((sign * inner, part * weight))
    total: Expr = Unary("neg", offset)
    total = reduce(_plus, (*of_row, *others), total)
    return reduce(_plus, scores, total)


def _plus(total: Expr, signed: Signed) -> Expr:
    """The sum, with the new part in front: a multiplication and an addition of it are one instruction."""
    sign, part = signed
    if isinstance(total, Unary) and sign > 0:
        return part - total.x
    return part + total if sign > 0 else total - part


def _terms(expr: Expr, sign: int = 1) -> list[Signed]:
    """The parts of a sum, with their signs."""
    if isinstance(expr, Binary) and expr.op in "+-":
        return _terms(expr.x, sign) + _terms(expr.y, sign if expr.op == "+" else -sign)
    return [(sign, expr)]


def _factors(term: Expr) -> tuple[list[Expr], Expr]:
    """The factors of a product that are the same for a whole tile, and the product of the others."""
    if isinstance(term, Binary) and term.op == "*":
        left, right = _factors(term.x), _factors(term.y)
        return left[0] + right[0], left[1] * right[1]
    return ([], term) if by_element(term) else ([term], Const(1))
