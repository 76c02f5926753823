"""C expressions: C's precedence keeps the value, and what C has no spelling for is refused."""

import math

import pytest
from c_evaluator import c_value
from expressions import NAMES, conditions, integers, values
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.emit.cexpr import c_text
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import (
    INF,
    NEG_INF,
    Binary,
    Cast,
    Compare,
    Const,
    I,
    J,
    Unary,
    Var,
    evaluate,
    exp2,
    load,
    log,
    maximum,
    minimum,
    select,
    substitute,
)

quick = settings(max_examples=80, deadline=None)
A, B, C = (Var(name) for name in NAMES)


def same(name):
    return name


@quick
@given(st.one_of(integers(), conditions()), values)
def test_c_has_the_value_of_the_expression(expr, values):
    assert c_value(c_text(expr, same), values) == evaluate(expr, values)


@quick
@given(integers(), integers(), values, st.sampled_from(["+", "-", "*"]))
def test_a_name_spelled_as_a_sum_keeps_its_value(expr, inner, values, op):
    """What a name stands for may be any expression; the text around it must not pull it apart."""
    spelled = {"a": f"({c_text(Binary(op, inner, B), same)})"}
    text = c_text(expr, lambda name: spelled.get(name, name))
    assert c_value(text, values) == evaluate(substitute(expr, {"a": Binary(op, inner, B)}), values)


MODULO = "floor_mod(a - b, 3) != floor_div(c, 2)"


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (A - (B - 1), "a - (b - 1)"),
        (A - B - 1, "a - b - 1"),
        ((A + B) * C, "(a + b) * c"),
        (A // B * C, "a / b * c"),
        (A * (B // C), "a * (b / c)"),
        (A % (B + 1), "a % (b + 1)"),
        ((A < B) & ((B < C) | A.equals(C)), "a < b && (b < c || a == c)"),
        (select(A < B, A, select(B < C, 1, 2)), "a < b ? a : (b < c ? 1 : 2)"),
        (select(A < B, A, B) + 1, "(a < b ? a : b) + 1"),
        (select(select(A < B, A < C, B < C), A, B), "(a < b ? a < c : b < c) ? a : b"),
        (minimum(A + 1, B) - maximum(A, 0), "min(a + 1, b) - max(a, 0)"),
        (Binary("-", A, Const(-3)), "a - -3"),
        (-A - -B, "-(a) - -(b)"),
        (exp2(A * 0.5), "exp2_approx(a * 0.5f)"),
        (log(A) * 2.0, "logf(a) * 2.0f"),
        (select(A.equals(NEG_INF), INF, A), "a == -INF ? INF : a"),
        (Unary("tanh", Cast(F32, A + 1)), "tanh_accurate(float(a + 1))"),
        (Compare("!=", Binary("floor_mod", A - B, Const(3)), Binary("floor_div", C, Const(2))), MODULO),
        (Const(True), "true"),
        (Const(1e-30), "1e-30f"),
        (Const(math.log2(math.e)), "1.4426950408889634f"),
    ],
)
def test_spelling(expr, expected):
    assert c_text(expr, same) == expected


def test_without_branches_conditions_are_joined_by_bits():
    both = (A < B) & ((B < C) | A.equals(C))
    assert c_text(select(both, A, B), same, branch=False) == "a < b & (b < c | a == c) ? a : b"


def test_no_branch_leaves_out_a_special_function_of_a_column():
    """ptxas would serialize the products around it; of a row alone, and of what costs nothing, ?: is left."""
    score, seen = load("s", I, J), J < A
    special = select(seen, exp2(score), NEG_INF)
    spelled = {"element": lambda load: "s", "branch": False}
    assert c_text(special, same, **spelled) == f"select(j < {A.name}, exp2_approx(s), -INF)"
    assert c_text(special, same, lambda load: "s") == f"j < {A.name} ? exp2_approx(s) : -INF"
    assert c_text(select(seen, score, NEG_INF), same, **spelled) == f"j < {A.name} ? s : -INF"
    of_row = select(A < B, log(load("l", I)), NEG_INF)
    assert c_text(of_row, same, **spelled) == f"{A.name} < {B.name} ? logf(s) : -INF"
    truth = select(seen, exp2(score) > 0.5, A < B)
    assert c_text(truth, same, **spelled) == f"j < {A.name} ? exp2_approx(s) > 0.5f : {A.name} < {B.name}"


@pytest.mark.parametrize(
    ("parent", "expected"),
    [(5, "a + b"), (6, "(a + b)")],
)
def test_a_parent_that_binds_tighter_gets_parentheses(parent, expected):
    assert c_text(A + B, same, parent=parent) == expected


def test_what_c_has_no_spelling_for_is_refused():
    with pytest.raises(ValueError, match="s is loaded in a uniform expression"):
        c_text(load("s", I) + 1, same)
    with pytest.raises(ValueError, match="rounded inside of an expression"):
        c_text(Cast(BF16, A) + 1, same)
    with pytest.raises(KeyError):
        c_text(Unary("sinh", A), same)
