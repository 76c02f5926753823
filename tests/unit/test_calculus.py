"""Interval evaluation of masks, against every element of small tiles."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.calculus import affine, extreme, grows, loop_limits, orders, somewhere_hidden, unguarded
from flashgen.ir.expr import Binary, Compare, Const, I, J, Unary, Var, evaluate, minimum, text

K, BLOCK, LENGTH, SHIFT = Var("k"), Var("block"), Var("length"), Var("shift")
quick = settings(max_examples=80, deadline=None)

# Affine in i, j and k * block; `shift` and `length` are run-time numbers.
atoms = [I, J, K * BLOCK, SHIFT, LENGTH, Const(3), Const(0)]


@st.composite
def sides(draw):
    """A sum and difference of distinct atoms."""
    chosen = draw(st.lists(st.sampled_from(range(len(atoms))), unique=True, min_size=1, max_size=4))
    total = atoms[chosen[0]]
    for at in chosen[1:]:
        total = total + atoms[at] if draw(st.booleans()) else total - atoms[at]
    return total


def _of_chunks(x, y, op, size):
    """A comparison of quotients, of a distance or of a remainder."""
    if size < 3:
        return Compare("<" if size == 1 else ">=", Unary("abs", x - y), Const(size))
    if size == 3:
        return Compare(op, Binary("floor_mod", x - y, Const(size)), Const(1))
    return Compare(op, Binary("floor_div", x, Const(size)), Binary("floor_div", y, Const(size)))


compares = st.builds(Compare, st.sampled_from(["<", "<=", ">", ">="]), sides(), sides())
masks = st.lists(compares, min_size=1, max_size=3).map(lambda parts: _conjunction(parts))
any_masks = st.recursive(
    compares | st.builds(_of_chunks, sides(), sides(), st.sampled_from(["<=", "==", "!=", ">"]), st.integers(1, 7)),
    lambda inner: st.builds(Binary, st.sampled_from("&|"), inner, inner),
    max_leaves=4,
)
scalars = st.fixed_dictionaries({"shift": st.integers(-9, 9), "length": st.integers(0, 20), "block": st.integers(1, 5)})


def _conjunction(parts):
    mask = parts[0]
    for part in parts[1:]:
        mask = Binary("&", mask, part)
    return mask


ROWS, COLS = 3, 4
RANGES = {"i": (Const(0), Const(ROWS - 1)), "j": (Const(0), Const(COLS - 1))}


def elements(expr, values):
    return [evaluate(expr, {**values, "i": i, "j": j}) for i, j in product(range(ROWS), range(COLS))]


@quick
@given(sides(), scalars, st.integers(0, 6))
def test_extremes_are_the_extremes(expr, scalars, k):
    values = {**scalars, "k": k}
    found = elements(expr, values)
    assert evaluate(extreme(expr, RANGES, upper=True), values) == max(found)
    assert evaluate(extreme(expr, RANGES, upper=False), values) == min(found)


@quick
@given(sides())
def test_affine_takes_an_expression_apart(expr):
    terms, rest = affine(expr, {"i", "j", "k"})
    values = {"i": 2, "j": 5, "k": 7, "block": 11, "shift": 13, "length": 17}
    total = sum(term.sign * values[name] * evaluate(term.factor, values) for name, term in terms.items())
    assert total + evaluate(rest, values) == evaluate(expr, values)
    assert all(evaluate(term.factor, values) > 0 for term in terms.values())


@quick
@given(masks, scalars, st.integers(0, 6))
def test_a_tile_without_the_guard_is_wholly_visible(mask, scalars, k):
    values = {**scalars, "k": k}
    found = somewhere_hidden(mask, RANGES)
    guard = found is None or evaluate(found, values)
    seen = elements(mask, values)
    assert guard or all(seen)
    shared = any({"i", "j"} & _coordinates(part.x) & _coordinates(part.y) for part in _comparisons(mask))
    if found is not None:
        assert shared or guard == (not all(seen)), "the guard is exact unless a coordinate stands on both sides"


@quick
@given(any_masks, scalars, st.integers(0, 6))
def test_guards_of_any_mask_are_safe(mask, scalars, k):
    values = {**scalars, "k": k}
    guard = somewhere_hidden(mask, RANGES)
    assert guard is None or evaluate(guard, values) or all(elements(mask, values))


@quick
@given(any_masks, scalars, st.integers(0, 3), st.integers(0, 6))
def test_limits_of_any_mask_are_safe(mask, scalars, start, stop):
    low, high = (evaluate(limit, scalars) for limit in loop_limits(mask, "k", RANGES, Const(start), Const(stop)))
    assert low >= start and high <= stop
    for k in range(start, stop):
        assert low <= k < high or not any(elements(mask, {**scalars, "k": k})), (
            f"step {k} is outside of {low} .. {high}"
        )


def _comparisons(mask):
    return [mask] if isinstance(mask, Compare) else _comparisons(mask.x) + _comparisons(mask.y)


def _coordinates(expr):
    return set(affine(expr, {"i", "j"})[0])


@pytest.mark.parametrize("seqlen_k", range(0, 13))
@pytest.mark.parametrize("shift", [-5, -1, 0, 2, 7])
def test_the_causal_limit_is_tight(seqlen_k, shift):
    """Every step that is left sees something, and `start` and `stop` are kept where nothing is known."""
    mask = (K * BLOCK + J < LENGTH) & (K * BLOCK + J <= I + SHIFT)
    values = {"length": seqlen_k, "shift": shift, "block": COLS}
    steps = (LENGTH + BLOCK - 1) // BLOCK
    start, stop = loop_limits(mask, "k", RANGES, Const(0), steps)
    assert start == Const(0)
    visited = range(evaluate(start, values), evaluate(stop, values))
    assert list(visited) == [k for k in range(evaluate(steps, values)) if any(elements(mask, {**values, "k": k}))]


@pytest.mark.parametrize("divisor", [1, 2, 4])
def test_the_limits_of_a_remainder_are_tight(divisor):
    """Rows of several heads in a tile: every remainder occurs, and so the extremes do."""
    ranges = {"i": (Const(0), Const(7)), "j": (Const(0), Const(COLS - 1))}
    mask = SHIFT + I % divisor >= K * BLOCK + J
    start, stop = loop_limits(mask, "k", ranges, Const(0), LENGTH)
    hidden = somewhere_hidden(mask, ranges)
    for shift in range(-3, 20):
        values = {"block": COLS, "shift": shift, "length": 6}
        seen = {k: [k * COLS + j <= shift + i % divisor for i in range(8) for j in range(COLS)] for k in range(6)}
        assert list(range(evaluate(start, values), evaluate(stop, values))) == [k for k in seen if any(seen[k])]
        assert all(evaluate(hidden, {**values, "k": k}) == (not all(seen[k])) for k in seen)


def test_a_limit_that_the_loop_has_already_is_not_repeated():
    steps = (LENGTH + BLOCK - 1) // BLOCK
    assert loop_limits(K * BLOCK + J < LENGTH, "k", RANGES, Const(0), steps) == (Const(0), steps)


@pytest.mark.parametrize(("mask", "expected"), [(K * BLOCK + J <= 9, (0, 3)), (K * BLOCK + J >= 10, (2, 6))])
def test_a_limit_of_constants_counts(mask, expected):
    limits = loop_limits(mask, "k", RANGES, Const(0), Const(6))
    assert tuple(evaluate(limit, {"block": COLS}) for limit in limits) == expected


WINDOWS = [
    (K * BLOCK + J >= I + SHIFT - 2) & (K * BLOCK + J <= I + SHIFT + 2),
    (K * BLOCK + J > I + SHIFT - 3) & (I + SHIFT + 3 > K * BLOCK + J),
    (I + SHIFT - 3 < K * BLOCK + J) & (K * BLOCK + J < I + SHIFT + 3),
]


CHUNKS = Compare("==", Binary("floor_div", I + SHIFT, Const(6)), Binary("floor_div", K * BLOCK + J, Const(6)))
PREFIX = (K * BLOCK + J < 6) | (K * BLOCK + J <= I + SHIFT)
DISTANCE = Unary("abs", I + SHIFT - (K * BLOCK + J)) <= 2


@pytest.mark.parametrize("mask", [*WINDOWS, CHUNKS, PREFIX, DISTANCE], ids=text)
def test_both_ends_of_a_window_are_tight(mask):
    limits = loop_limits(mask, "k", RANGES, Const(0), LENGTH)
    for shift in range(0, 30):
        values = {"block": COLS, "shift": shift, "length": 9}
        visited = range(*(evaluate(limit, values) for limit in limits))
        assert list(visited) == [k for k in range(9) if any(elements(mask, {**values, "k": k}))]


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        (I * I, "is not affine in i"),
        (I * J, "is not affine in i, j"),
        (I * -2, "is not affine in i"),
        (I % 2, "is not affine in i"),
        (minimum(I, 3), "is not affine in i"),
        (SHIFT * I, "is not affine in i"),
        (I + J - I, "names a coordinate twice"),
    ],
)
def test_what_is_not_affine_is_refused(expr, reason):
    with pytest.raises(ValueError, match=reason):
        affine(expr, {"i", "j"} if "j" in text(expr) else {"i"})


UNKNOWN = [Compare("==", Binary("floor_mod", I - J, Const(3)), Const(0)), Unary("sin", I) < 0.5, Const(False)]


@pytest.mark.parametrize("mask", UNKNOWN, ids=text)
def test_a_mask_of_which_nothing_is_known_limits_nothing(mask):
    known = K * BLOCK + J <= I + SHIFT
    assert somewhere_hidden(mask & known, RANGES) is None and unguarded(mask & known, RANGES) == [mask]
    assert somewhere_hidden(mask | known, RANGES) == somewhere_hidden(known, RANGES)
    tight = loop_limits(known, "k", RANGES, Const(0), LENGTH)
    assert loop_limits(mask & known, "k", RANGES, Const(0), LENGTH) == tight
    assert loop_limits(mask | known, "k", RANGES, Const(0), LENGTH) == (Const(0), LENGTH)


def test_limits_that_another_loop_changes_are_left_out():
    mask = (K * BLOCK + J <= I + SHIFT) & (I - Var("head") <= K * BLOCK + J)
    first, last = loop_limits(mask, "k", RANGES, Const(0), LENGTH, frozenset({"head"}))
    assert first == Const(0) and last != LENGTH


def test_orders_bring_the_name_out():
    quotients = Compare("==", Binary("floor_div", J, Const(4)), Binary("floor_div", I, Const(4)))
    chunk = Binary("floor_div", I, Const(4)) * 4
    assert orders(quotients, "j") == [Compare("<", J, chunk + 4), Compare(">=", J, chunk)]
    near = Compare(">", Const(5), Unary("abs", J - I))
    assert orders(near, "j") == [Compare("<", J - I, Const(5)), Compare(">", J - I, Const(-5))]
    for mask in (Compare("<", J, Const(0.5)), Compare("!=", J, I)):
        with pytest.raises(ValueError, match="not one of order between integers"):
            orders(mask, "j")


END = K * BLOCK + J


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Compare("<=", END, I + Var("place")), True),
        (Compare("<=", END, I + Var("place")) & Compare(">", END, I + Var("place") - 4), False),
        (Compare("<=", END, I + Var("place")) | Compare("<", END, Const(4)), True),
        (Compare("<", END, LENGTH), False),
    ],
)
def test_what_grows_has_an_end_that_moves_alone(mask, expected):
    assert grows(mask, "k", "place") is expected
