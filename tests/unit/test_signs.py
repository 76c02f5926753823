"""Absolute values that a mask makes needless, against every element of small tiles."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import masks, scores, trace
from flashgen.attention import parts
from flashgen.calculus import without_signs
from flashgen.ir.dtype import F32
from flashgen.ir.expr import Binary, Cast, Compare, Const, Load, Unary, Var, evaluate, text, walk
from flashgen.spec import Spec

Q, K, N, M = (Var(name) for name in ("q_idx", "kv_idx", "seqlen_q", "seqlen_k"))
INTEGERS = {"q_idx", "kv_idx", "seqlen_q", "seqlen_k"}
ATOMS = (Q, K, N, M, Const(1), Const(3))
sums = st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from("+-")), min_size=1, max_size=4)


def total(parts):
    found = Const(0)
    for atom, op in parts:
        found = Binary(op, found, atom)
    return found


def absolute_values(expr):
    return [node for node in walk(expr) if isinstance(node, Unary) and node.op == "abs"]


def simplified(expr, *conditions):
    return without_signs(expr, conditions, INTEGERS, "score")


@given(sums, sums, sums, st.sampled_from(["<", "<=", ">", ">="]), st.sampled_from("+-"), st.integers(-2, 2))
@settings(max_examples=150, deadline=None)
def test_where_the_conditions_hold_it_is_the_same(inner, left, right, op, sign, more):
    """What is compared is mostly the same distance, or else nothing would ever be found."""
    condition = Compare(op, total(left), total(right))
    distance = Binary("-", total(left), total(right)) if more else total(inner)
    expr = Binary(sign, Var("score"), Binary("*", Const(5), Unary("abs", Binary("+", distance, Const(more)))))
    found = simplified(expr, condition)
    for values in product(range(-2, 3), repeat=4):
        named = dict(zip(("q_idx", "kv_idx", "seqlen_q", "seqlen_k"), values, strict=True)) | {"score": 7}
        if evaluate(condition, named):
            assert evaluate(found, named) == evaluate(expr, named), text(expr)


@pytest.mark.parametrize(
    ("distance", "condition", "left"),
    [
        (Q - K, K <= Q, "q_idx - kv_idx"),
        (K - Q, K <= Q, "q_idx - kv_idx"),
        (Q + (M - N) - K, K <= Q + (M - N), "q_idx + (seqlen_k - seqlen_q) - kv_idx"),
        (Q - K + 1, K < Q, "q_idx - kv_idx + 1"),
        (Q - K - 1, K < Q, "q_idx - kv_idx - 1"),
        (K, K >= 0, "kv_idx"),
        (Q - K - 1, K <= Q, None),
        (Q - K, K <= Q + 1, None),
        (Q - M, K <= Q, None),
    ],
)
def test_what_is_left_of_a_distance(distance, condition, left):
    expr = Var("score") - Const(0.5) * Cast(F32, Unary("abs", distance))
    found = simplified(expr, condition)
    assert text(found) == (text(expr) if left is None else f"score - 0.5 * float32({left})")


@pytest.mark.parametrize(
    "expr",
    [
        Var("score") * Unary("abs", Q - K),  # a derivative by the score would have another sign where nothing is seen
        Var("score") - Unary("log", Unary("abs", Q - K)),  # which has no value for what is hidden
        Var("score") - Unary("abs", Load("x", (Q,))),
    ],
    ids=text,
)
def test_what_is_left_alone(expr):
    assert simplified(expr, K <= Q) == expr


@pytest.mark.parametrize(
    "condition",
    [Load("x", (K,)) <= Load("x", (Q,)), Cast(F32, K) < Cast(F32, Q), (Q - K).equals(0), Const(True)],
    ids=text,
)
def test_conditions_that_say_nothing(condition):
    expr = Var("score") - Unary("abs", Q - K)
    assert simplified(expr, condition) == expr


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"causal": True}, 0),
        ({"mask": trace.mask(masks.causal_top_left)}, 1),
        ({}, 1),
        ({"mask": trace.mask(masks.window(9, 0))}, 0),
    ],
    ids=["causal", "top left", "full", "window"],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_alibi(options, kept, transposed):
    """Its distance is that of the bottom right, as that of causal and of windows is."""
    found = parts.scored(Spec(64, 64, score=trace.score(scores.alibi), **options), transposed)
    assert len(absolute_values(found)) == kept
