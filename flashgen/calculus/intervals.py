"""Interval evaluation of masks: where a block is wholly visible, and which blocks can be skipped.

A mask is made of comparisons, & and |. Where both sides of a comparison are affine in the tile coordinates i, j and in
a loop variable, its extremes over a tile are at the corners, which gives three answers for a block without looking at
its elements: ALWAYS visible (no mask is needed), NEVER (the loop does not go there), MAYBE (masked element by element).
Of other comparisons of integers bounds are found where they can be; those of which nothing is known are MAYBE.
Dimensions (block_q, block_kv) count as positive constants. A remainder of a coordinate counts as a coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashgen.ir.expr import (
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    Load,
    Select,
    Unary,
    Var,
    binary,
    evaluate,
    maximum,
    minimum,
    rebuild,
    text,
    variables,
    walk,
)

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
    if isinstance(expr, Binary) and expr.op == "*" and isinstance(expr.y, Const) and expr.y.value > 0:
        terms, rest = affine(expr.x, names)
        return {name: Term(term.sign, term.factor * expr.y) for name, term in terms.items()}, rest * expr.y
    raise ValueError(f"mask {text(expr)} is not affine in {', '.join(sorted(names))}")


def _is_factor(expr: Expr, names: set[str]) -> bool:
    """True for what counts as a positive constant: a dimension, or a positive number."""
    return expr.value > 0 if isinstance(expr, Const) else not variables(expr) & names


def extreme(expr: Expr, ranges: Ranges, upper: bool) -> Expr:
    """The largest (or least) value over the ranges of the variables, or of what is not affine a bound of it.

    ValueError where no bound is known.
    """
    try:
        return _affine_extreme(expr, ranges, upper)
    except ValueError:
        return _bound(expr, ranges, upper)


def _affine_extreme(expr: Expr, ranges: Ranges, upper: bool) -> Expr:
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


def _bound(expr: Expr, ranges: Ranges, upper: bool) -> Expr:
    """A bound from those of the parts."""
    if not variables(expr) & set(ranges):
        return expr
    match expr:
        case Var(name):
            return ranges[name][upper]
        case Binary("+" | "min" | "max" as op, x, y):
            return binary(op, extreme(x, ranges, upper), extreme(y, ranges, upper))
        case Binary("-", x, y):
            return extreme(x, ranges, upper) - extreme(y, ranges, not upper)
        case Binary("*", x, Const(factor)):
            return extreme(x, ranges, upper == (factor > 0)) * factor
        case Binary("//" | "floor_div" as op, x, y) if not variables(y) & set(ranges):
            return binary(op, extreme(x, ranges, upper), y)
        case Binary("%" | "floor_mod", _, y) if not variables(y) & set(ranges):
            return y - 1 if upper else Const(0)
        case Unary("abs", x):
            low, high = extreme(x, ranges, False), extreme(x, ranges, True)
            return maximum(high, 0 - low) if upper else maximum(maximum(low, 0 - high), 0)
        case Select(_, x, y):
            return (maximum if upper else minimum)(extreme(x, ranges, upper), extreme(y, ranges, upper))
    raise ValueError(f"mask {text(expr)} has no bound that is known")


_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def orders(compare: Compare, name: str) -> list[Compare]:
    """Order comparisons that hold together where the comparison does, with `name` outside of floor_div and abs.

    ValueError where there are none, and for comparisons of what is no integer.
    """
    op, x, y = compare.op, compare.x, compare.y
    if not (_is_integer(x) and _is_integer(y)) or op == "!=":
        raise ValueError(f"mask {text(compare)} is not one of order between integers")
    if op == "==":
        return [*orders(Compare("<=", x, y), name), *orders(Compare(">=", x, y), name)]
    if _hides(y, name) and not _hides(x, name):
        return orders(Compare(_MIRRORED[op], y, x), name)
    if not _hides(x, name):
        return [compare]
    if isinstance(x, Unary) and op in ("<", "<=") and name not in variables(y):
        return [*orders(Compare(op, x.x, y), name), *orders(Compare(_MIRRORED[op], x.x, 0 - y), name)]
    if isinstance(x, Binary) and isinstance(x.y, Const) and name not in variables(y):
        limit = y * x.y + (x.y if op in ("<=", ">") else 0)
        return orders(Compare("<" if op in ("<", "<=") else ">=", x.x, limit), name)
    raise ValueError(f"mask {text(compare)} does not limit {name}")


def _hides(expr: Expr, name: str) -> bool:
    """True for floor_div or abs of something with the name in it."""
    return isinstance(expr, Binary | Unary) and expr.op in ("floor_div", "abs") and name in variables(expr)


def _is_integer(expr: Expr) -> bool:
    """True for what is made of integers alone."""
    return not any(
        (isinstance(node, Const) and isinstance(node.value, float))
        or isinstance(node, Cast | Load)
        or (isinstance(node, Unary) and node.op != "abs")
        for node in walk(expr)
    )


def somewhere_hidden(mask: Expr, ranges: Ranges) -> Expr | None:
    """A condition that holds unless every element of the tile is visible (the opposite of ALWAYS).

    None where it would hold always, or no such condition is known.
    """
    if isinstance(mask, Binary) and mask.op in "&|":
        one, other = somewhere_hidden(mask.x, ranges), somewhere_hidden(mask.y, ranges)
        if one is None or other is None:
            return None if mask.op == "&" else one or other
        return one | other if mask.op == "&" else one & other
    try:
        return _comparison_hides(mask, ranges) if isinstance(mask, Compare) else None
    except ValueError:
        return None


def _comparison_hides(compare: Compare, ranges: Ranges) -> Expr | None:
    x, y = compare.x, compare.y
    if not (_is_integer(x) and _is_integer(y)):
        raise ValueError(f"mask {text(compare)} compares what is no integer")
    if compare.op == "!=":
        met = extreme(x, ranges, upper=True) >= extreme(y, ranges, upper=False)
        return met & (extreme(x, ranges, upper=False) <= extreme(y, ranges, upper=True))
    if compare.op == "==":
        return somewhere_hidden((x <= y) & (x >= y), ranges)
    rising = compare.op in ("<", "<=")
    worst = Compare(_NEGATED[compare.op], extreme(x, ranges, upper=rising), extreme(y, ranges, upper=not rising))
    return None if not variables(worst) and evaluate(worst, {}) else worst


def unguarded(mask: Expr, ranges: Ranges) -> list[Expr]:
    """The parts of a mask that are evaluated for the elements of every tile."""
    if isinstance(mask, Binary) and mask.op == "&":
        return unguarded(mask.x, ranges) + unguarded(mask.y, ranges)
    return [mask] if somewhere_hidden(mask, ranges) is None else []


def loop_limits(
    mask: Expr, loop: str, ranges: Ranges, start: Expr, stop: Expr, inner: frozenset[str] = frozenset()
) -> tuple[Expr, Expr]:
    """`start` and `stop` of a loop over blocks, tightened so that blocks with no visible element are not visited.

    inner: variables that limits must not depend on.
    """
    first, last = limits(mask, loop, ranges, variables(start) | variables(stop), inner)
    return (
        start if first is None else maximum(start, first),
        stop if last is None else minimum(stop, last),
    )


def grows(mask: Expr, loop: str, place: str) -> bool:
    """True where the loop's first block with a visible element is the same for every `place`, and its last one not.

    Tile coordinates i and j count as 0: of these only the sign matters here.
    """
    corner = {"i": (Const(0), Const(0)), "j": (Const(0), Const(0))}
    first, last = limits(mask, loop, corner, set(), frozenset())
    varies = [limit is not None and place in variables(limit) for limit in (first, last)]
    return varies == [False, True]


Limits = tuple[Expr | None, Expr | None]


def limits(mask: Expr, loop: str, ranges: Ranges, known: set[str], inner: frozenset[str] = frozenset()) -> Limits:
    """The first block with a visible element and the one behind the last; None where no such limit is known.

    known, inner: limits that depend on nothing but `known`, or on one of `inner`, are left out.
    """
    if isinstance(mask, Binary) and mask.op in "&|":
        one, other = (limits(part, loop, ranges, known, inner) for part in (mask.x, mask.y))
        within = mask.op == "&"
        later, earlier = (maximum, minimum) if within else (minimum, maximum)
        return _joined(one[0], other[0], later, within), _joined(one[1], other[1], earlier, within)
    found: Limits = (None, None)
    try:
        for compare in orders(mask, loop) if isinstance(mask, Compare) else ():
            first, last = _order_limits(compare, loop, ranges, known, inner)
            found = _joined(found[0], first, maximum, True), _joined(found[1], last, minimum, True)
    except ValueError:
        pass
    return found


def _joined(one: Expr | None, other: Expr | None, join: Callable[[Expr, Expr], Expr], within: bool) -> Expr | None:
    """Both limits as one; where one is missing it is the other's for a conjunction, and none for a disjunction."""
    if one is None or other is None:
        return (one or other) if within else None
    return join(one, other)


def _order_limits(compare: Compare, loop: str, ranges: Ranges, known: set[str], inner: frozenset[str]) -> Limits:
    terms, rest = affine(_best_slack(compare, ranges), {loop})
    if loop not in terms:
        return None, None
    factor = terms[loop].factor
    names = variables(rest) - variables(factor)
    if names and names <= known:  # such as the end of the keys, where the loop stops already
        return None, None
    if names & inner:
        return None, None
    if terms[loop].sign < 0:
        return None, maximum(rest + factor, 0) // factor
    return maximum(factor - 1 - rest, 0) // factor, None


def _best_slack(compare: Compare, ranges: Ranges) -> Expr:
    """An expression that is non-negative where some element of the tile satisfies the comparison."""
    low, high = (compare.x, compare.y) if compare.op in ("<", "<=") else (compare.y, compare.x)
    slack = extreme(high, ranges, upper=True) - extreme(low, ranges, upper=False)
    return slack - 1 if compare.op in ("<", ">") else slack
