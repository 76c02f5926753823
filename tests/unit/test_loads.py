"""What score functions load: by which element they are derived, and how an index depends on query and key."""

import pytest
from functions import READING_SCORES

from flashgen import scores, trace
from flashgen.calculus import by_distance, derivative_by_load, loads_of
from flashgen.ir.dtype import F32
from flashgen.ir.expr import Const, Var, text
from flashgen.runtime import aux_gradients
from flashgen.runtime.arguments import Problem
from flashgen.spec import Array, Spec


def test_each_load_is_derived_by_alone():
    expr = trace.score(lambda s, b, h, q, k, t: s * t[0, h] + t[1, h] * t[1, h] + t[0, h]).expr
    first, second = loads_of(expr, "score_t")
    assert [text(load) for load in (first, second)] == ["score_t[0, h]", "score_t[1, h]"]
    assert text(derivative_by_load(expr, first)) == "score + 1.0"
    assert text(derivative_by_load(expr, second)) == "score_t[1, h] + score_t[1, h]"
    assert loads_of(expr, "another") == ()


def test_what_is_only_compared_has_no_gradient():
    import flashgen

    function = trace.score(lambda s, b, h, q, k, t: flashgen.where(t[h] > 0.5, s, 2.0 * s))
    item = Array("score_t", 1, F32)
    assert aux_gradients.parts(Spec(16, 16, score=function), item, (4,), Problem(1, 4, 4, 8, 8, 16, 16, ())) == ()


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (lambda q, k: abs(q - k), True),
        (lambda q, k: (k - (q + 3)) // 4 % 5, True),
        (lambda q, k: 2 * q - 2 * k, True),
        (lambda q, k: 2 * q - k, False),
        (lambda q, k: q + k, False),
        (lambda q, k: abs(q - k) + q, False),
        (lambda q, k: q // 2 - k // 2, False),
        (lambda q, k: (q - k >= 4) * 1, True),
    ],
)
def test_by_distance(index, expected):
    expr = trace.score(lambda s, b, h, q, k, t: s + t[index(q, k), h]).expr
    (load,) = loads_of(expr, "score_t")
    assert by_distance(load.index[0], "q_idx", "kv_idx") is expected
    assert by_distance(load.index[1], "q_idx", "kv_idx")


def test_a_loaded_index_counts_as_its_own_index():
    expr = trace.score(READING_SCORES["buckets"]).expr
    loads = loads_of(expr, "score_table")
    assert [by_distance(load, "q_idx", "kv_idx") for load in loads] == [True, True]


@pytest.mark.parametrize(
    ("shape", "plain"),
    [((2, 4, 8, 9), True), ((1, 1, 8, 9), True), ((2, 4, 20, 9), True), ((2, 4, 8, 5), False), ((2, 3, 8, 9), False)],
)
def test_an_axis_is_plain_where_it_is_whole_or_of_one_element(shape, plain):
    """An index beyond the array reads its last element, so that several scores share it."""
    spec = Spec(16, 16, score=trace.score(scores.bias))
    (part,) = aux_gradients.parts(spec, spec.arrays[0], shape, Problem(2, 4, 2, 8, 9, 16, 16, ()))
    assert part.plain is plain
    assert part.index[:1] == ((Const(0),) if shape[0] == 1 else (Var("b"),))
