"""Interval evaluation of masks: where a block is wholly visible, and which blocks can be skipped.

A mask is a conjunction of comparisons that are affine in the tile coordinates i, j and in a loop variable. Its extremes
over a tile are at the corners, which gives three answers for a block without looking at its elements: ALWAYS visible
(no mask is needed), NEVER (the loop does not go there), MAYBE (masked element by element).
Dimensions (block_q, block_kv) count as positive constants. A remainder of a coordinate counts as a coordinate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashgen.ir.expr import Binary, Compare, Const, Expr, Var, maximum, minimum, rebuild, text, variables

Ranges = Mapping[str, tuple[Expr, Expr]]


@dataclass(frozen=True)
class Term:
    """One variable's part of an affine expression: sign (+1 or -1) times a positive factor."""

    sign: int
    factor: Expr


def affine(expr: Expr, names: set[str]) -> tuple[dict[str, Term], Expr]:
    """The terms of `names` in an affine expression, and the rest; ValueError where it is not affine."""
    if not variables(expr) & names:
        return {}, expr
    if isinstance(expr, Var):
        return {expr.name: Term(1, Const(1))}, Const(0)
    if isinstance(expr, Binary) and expr.op in "+-":
        sign = 1 if expr.op == "+" else -1
        left, left_rest = affine(expr.x, names)
        right, right_rest = affine(expr.y, names)
        if left.keys() & right.keys():
            raise ValueError(f"mask {text(expr)} names a coordinate twice; write it once")
        terms = left | {name: Term(sign * term.sign, term.factor) for name, term in right.items()}
        return terms, left_rest + right_rest if sign > 0 else left_rest - right_rest
    if isinstance(expr, Binary) and expr.op == "*" and isinstance(expr.x, Var) and _is_factor(expr.y, names):
        return {expr.x.name: Term(1, expr.y)}, Const(0)
    raise ValueError(f"mask {text(expr)} is not affine in {', '.join(sorted(names))}")


def _is_factor(expr: Expr, names: set[str]) -> bool:
    """True for what counts as a positive constant: a dimension, or a positive number."""
    return expr.value > 0 if isinstance(expr, Const) else not variables(expr) & names


def extreme(expr: Expr, ranges: Ranges, upper: bool) -> Expr:
    """The largest (or least) value of an affine expression over the ranges of its variables."""
    remainders: dict[str, tuple[Expr, Expr]] = {}
    expr = _named_remainders(expr, ranges, remainders)
    ranges = {**ranges, **remainders}
    terms, value = affine(expr, set(ranges))
    for name, term in terms.items():
        low, high = ranges[name]
        end = high if (term.sign > 0) == upper else low
        value = value + end * term.factor if term.sign > 0 else value - end * term.factor
    return value


def _named_remainders(expr: Expr, ranges: Ranges, found: dict[str, tuple[Expr, Expr]]) -> Expr:
    """The expression with each remainder of a coordinate as a variable, whose range is noted in `found`.

    The coordinate's own range starts at 0 and is a multiple of the divisor, so that every remainder occurs.
    """
    if isinstance(expr, Binary) and expr.op == "%" and isinstance(expr.x, Var) and expr.x.name in ranges:
        found[text(expr)] = (Const(0), expr.y - 1)
        return Var(text(expr))
    return rebuild(expr, lambda child: _named_remainders(child, ranges, found))


def conjuncts(mask: Expr) -> Iterator[Compare]:
    """The comparisons whose conjunction the mask is."""
    if isinstance(mask, Binary) and mask.op == "&":
        yield from conjuncts(mask.x)
        yield from conjuncts(mask.y)
    elif isinstance(mask, Compare) and mask.op in ("<", "<=", ">", ">="):
        yield mask
    else:
        raise ValueError(f"mask {text(mask)} must be a conjunction of order comparisons")


_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}


def somewhere_hidden(mask: Expr, ranges: Ranges) -> Expr:
    """A condition that holds unless every element of the tile is visible (the opposite of ALWAYS)."""
    condition: Expr | None = None
    for compare in conjuncts(mask):
        rising = compare.op in ("<", "<=")
        worst = Compare(
            _NEGATED[compare.op],
            extreme(compare.x, ranges, upper=rising),
            extreme(compare.y, ranges, upper=not rising),
        )
        condition = worst if condition is None else condition | worst
    assert condition is not None
    return condition


def loop_limits(mask: Expr, loop: str, ranges: Ranges, start: Expr, stop: Expr) -> tuple[Expr, Expr]:
    """`start` and `stop` of a loop over blocks, tightened so that blocks with no visible element are not visited."""
    known = variables(start) | variables(stop)
    for compare in conjuncts(mask):
        slack = _best_slack(compare, ranges)
        terms, rest = affine(slack, {loop})
        if loop not in terms:
            continue
        factor = terms[loop].factor
        limits = variables(rest) - variables(factor)
        if limits and limits <= known:  # such as the end of the keys, where the loop stops already
            continue
        if terms[loop].sign < 0:
            stop = minimum(stop, maximum(rest + factor, 0) // factor)
        else:
            start = maximum(start, maximum(factor - 1 - rest, 0) // factor)
    return start, stop


def _best_slack(compare: Compare, ranges: Ranges) -> Expr:
    """An expression that is non-negative where some element of the tile satisfies the comparison."""
    low, high = (compare.x, compare.y) if compare.op in ("<", "<=") else (compare.y, compare.x)
    slack = extreme(high, ranges, upper=True) - extreme(low, ranges, upper=False)
    return slack - 1 if compare.op in ("<", ">") else slack
