"""Exponents made where the scores are: what a function adds, the offset and the change to powers of two are one sum.

Where the maximum is guessed a step knows its offset before its scores. exp2((score * scale + more) * log2(e) - offset)
is then computed as exp2(score * (scale * log2(e)) + (more * log2(e) - offset)), a fused multiplication and addition for
the score and one for each part of `more` that differs by row and column. What differs by row alone is one number for
all columns: of ALiBi's slope * (row - column) one instruction an element is left of three.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import mul

from flashgen.ir.expr import Binary, Const, Expr, I, J, Load, Unary, by_element, load, walk
from flashgen.ir.graph import access
from flashgen.ir.nodes import For, If, Kernel, Stmt
from flashgen.ir.visit import Body
from flashgen.lower.sm90.roles import in_role, within
from flashgen.lower.sm90.select import hides
from flashgen.machine.base import MapFragment
from flashgen.plan.plan import Plan

SCORES = "s"
SCORE = load(SCORES, I, J)
Signed = tuple[int, Expr]


def join_exponents(kernel: Kernel, plan: Plan) -> Kernel:
    """Let the scores of a step with a guessed maximum be the exponents of its probabilities.

    Invariant: none; the same numbers, rounded at other places. Hidden ones are -inf as before.
    """
    return in_role(kernel, "consumer", _joined) if plan.has("guessed maximum") else kernel


def _joined(body: Body) -> Body:
    body = within(body, _joined)
    for at, stmt in enumerate(body):
        match stmt:
            case MapFragment(_, Unary("exp2", Binary("-", Binary("*", x, factor), Load() as offset))) if x == SCORE:
                return _moved(body, at, factor, offset)
    return body


def _moved(body: Body, at: int, factor: Expr, offset: Load) -> Body:
    """The body with the offset ahead of the map of the scores, where nothing else needs these or the offset's place."""
    touching = [here for here in range(at) if SCORES in access(body[here]).reads | access(body[here]).writes]
    mapped = next((here for here in touching if _is_map(body[here])), None)
    guess = next((here for here in range(at) if body[here].writes() == (offset.buffer,)), None)
    if mapped is None or guess is None or SCORES in access(body[guess]).reads:
        return body
    if not all(_only_hides(body[here]) for here in touching if here > mapped):
        return body
    stmt, weights = body[mapped], body[at]
    assert isinstance(stmt, MapFragment) and isinstance(weights, MapFragment)
    exponents = replace(stmt, expr=exponent(stmt.expr, factor, offset))
    rest = [other for here, other in enumerate(body[mapped + 1 : at], mapped + 1) if here != guess]
    ahead = (body[guess],) if guess > mapped else ()
    return (*body[:mapped], *ahead, exponents, *rest, replace(weights, expr=Unary("exp2", SCORE)), *body[at + 1 :])


def _is_map(stmt: Stmt) -> bool:
    return type(stmt) is MapFragment and stmt.dst == SCORES and not hides(stmt)


def _only_hides(stmt: Stmt) -> bool:
    return all(map(_only_hides, stmt.body)) if isinstance(stmt, If | For) else hides(stmt)


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
