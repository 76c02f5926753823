"""Scalar expressions: folding and substitution keep the value, the text tells trees apart."""

import math
import re

import numpy as np
import pytest
from expressions import NAMES, conditions, integers, values
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashgen.interp import common
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import (
    NEG_INF,
    Binary,
    Cast,
    Compare,
    Const,
    I,
    J,
    Unary,
    Var,
    binary,
    ceil_div,
    children,
    evaluate,
    exp2,
    load,
    maximum,
    minimum,
    rebuild,
    select,
    substitute,
    text,
    variables,
    walk,
)

A, B = Var("a"), Var("b")
quick = settings(max_examples=80, deadline=None)


def folded(expr):
    """The same expression built again from its leaves, through the folding constructors."""
    return rebuild(expr, folded)


def size(expr):
    return sum(1 for _ in walk(expr))


@quick
@given(integers(), values)
def test_folding_keeps_the_value(expr, values):
    small = folded(expr)
    assert evaluate(small, values) == evaluate(expr, values)
    assert size(small) <= size(expr)
    assert folded(small) == small, "folding is finished after one pass"


@quick
@given(conditions(), values)
def test_conditions_have_the_value_of_their_folded_form(expr, values):
    assert evaluate(folded(expr), values) == evaluate(expr, values)


@quick
@given(integers(), integers(), values)
def test_substitution_is_evaluation_under_other_values(expr, inner, values):
    replaced = substitute(expr, {"a": inner})
    assert evaluate(replaced, values) == evaluate(expr, {**values, "a": evaluate(inner, values)})
    assert variables(replaced) <= variables(expr) - {"a"} | variables(inner)


def test_substitution_is_simultaneous():
    assert substitute(A - B, {"a": B, "b": A}) == B - A


@quick
@given(integers(), values)
def test_only_the_free_variables_matter(expr, values):
    for name in set(NAMES) - variables(expr):
        assert evaluate(expr, {**values, name: 10**6}) == evaluate(expr, values)
    evaluate(expr, {name: values[name] for name in variables(expr)})


# Text


PYTHON = {" & ": " and ", " | ": " or "}
FUNCTIONS = {"select": lambda condition, x, y: x if condition else y, "neg": lambda x: -x, "min": min, "max": max}


@quick
@given(st.one_of(integers(), conditions()), values)
def test_text_reads_back_as_the_same_value(expr, values):
    spelled = re.sub(r" [&|] ", lambda found: PYTHON[found.group()], text(expr))
    assert eval(spelled, {**FUNCTIONS, **values}) == evaluate(expr, values)


@quick
@given(integers(), integers())
def test_text_is_an_identity(one, other):
    assume(one != other)
    assert text(one) != text(other)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (A - (B - 1), "a - (b - 1)"),
        ((A - B) - 1, "a - b - 1"),
        (A * (B + 1) % 2, "a * (b + 1) % 2"),
        (A * (B % 2), "a * (b % 2)"),
        ((A < B) & ((B < 3) | (A.equals(0))), "a < b & (b < 3 | a == 0)"),
        (select(A < B, load("s", I, J), NEG_INF), "select(a < b, s[i, j], -inf)"),
        (Cast(BF16, load("p", I, J) * 0.5), "bfloat16(p[i, j] * 0.5)"),
        (exp2(-A), "exp2(neg(a))"),
        (Const(True), "True"),
        (minimum(A, B) // 2, "min(a, b) // 2"),
    ],
)
def test_canonical_text(expr, expected):
    assert text(expr) == expected


# Construction


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (A + 0, A),
        (0 + A, A),
        (A - 0, A),
        (A * 1, A),
        (1 * A, A),
        (A // 1, A),
        (0 * A, Const(0)),
        (A + 1 + 2, Binary("+", A, Const(3))),
        (A + 1 - 1, A),
        (A - 1 - 2, Binary("-", A, Const(3))),
        (A + 1 - 3, Binary("-", A, Const(2))),
        (A - 3 + 1, Binary("-", A, Const(2))),
        (Const(7) // 2, Const(3)),
        (maximum(Const(2), 5), Const(5)),
        (Const(2.0) * 3, Binary("*", Const(2.0), Const(3))),
        (A + 0.5 + 1, Binary("+", Binary("+", A, Const(0.5)), Const(1))),
        (2 - A, Binary("-", Const(2), A)),
        (6 * A, Binary("*", Const(6), A)),
        (1 / A, Binary("/", Const(1), A)),
    ],
)
def test_folding(expr, expected):
    assert expr == expected and text(expr) == text(expected)


def test_constants_of_other_types_are_other_texts():
    assert len({text(Const(value)) for value in (1, 1.0, True)}) == 3


@pytest.mark.parametrize("y", range(1, 9))
def test_ceil_div(y):
    for x in range(30):
        assert evaluate(ceil_div(A, B), {"a": x, "b": y}) == math.ceil(x / y)
        assert ceil_div(x, y) == Const(math.ceil(x / y))


def test_comparisons_build_trees_and_equality_compares_them():
    assert (A < 3) == Compare("<", A, Const(3)) and (A >= B) == Compare(">=", A, B)
    assert A.equals(B) == Compare("==", A, B)
    assert Var("a") == A and A != B and len({A, Var("a"), B}) == 2


def test_walk_meets_loads_inside_of_indices():
    expr = select(load("m", load("n", I)) < 3, A, B)
    assert [type(node).__name__ for node in walk(expr)] == [
        *("Select", "Compare", "Load", "Load", "Var", "Const", "Var", "Var")
    ]
    assert variables(expr) == {"a", "b", "i"}
    assert list(children(load("x", I, J))) == [I, J]


@pytest.mark.parametrize("expr", [load("x", I), exp2(A), Cast(F32, A)])
def test_only_uniform_expressions_are_evaluated(expr):
    with pytest.raises(TypeError, match="is not a uniform integer expression"):
        evaluate(expr + 1, {"a": 1, "i": 0})


def test_unbound_variables_are_errors():
    with pytest.raises(KeyError):
        evaluate(A + B, {"a": 1})


# The interpreter's evaluation, which the grids and loops of the CPU path use, is the same function.


@quick
@given(st.one_of(integers(), conditions()), values)
def test_the_interpreter_agrees(expr, values):
    assert common.evaluate(expr, common.Uniform(values)) == evaluate(expr, values)


@quick
@given(integers(), st.lists(values, min_size=1, max_size=5))
def test_the_interpreter_agrees_element_by_element(expr, rows):
    arrays = {name: np.array([row[name] for row in rows]) for name in NAMES}
    result = np.broadcast_to(common.evaluate(expr, common.Uniform(arrays)), (len(rows),))
    assert result.tolist() == [evaluate(expr, row) for row in rows]


def test_unary_minus_is_one_operation():
    assert binary("-", Const(0), A) != -A == Unary("neg", A)
