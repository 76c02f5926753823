"""Kernels with mask and score functions on both interpreters, against dense float64 attention and torch's autograd."""

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from functions import MASKS, SCORES, traced
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered_cases import Choice, compare, plans
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile

from flashgen import lower
from flashgen.attention import backward as nests
from flashgen.ir.dtype import BF16, F16
from flashgen.spec import Spec

LENGTHS = [(21, 30), (30, 13)]
TAME = [name for name in SCORES if name != "infinite"]


def tiled(problem, *blocks):
    """Every kernel of a problem in the form that the CPU runs."""
    return problem.run_tile(*blocks, kernels=[lower.tile(kernel) for kernel in problem.kernels()])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("score", [None, *TAME])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_every_mask_with_every_score_function(mask, score, lengths):
    for deterministic, causal in ((False, True), (True, False)):
        spec = Spec(16, 8, BF16, deterministic=deterministic, **traced(causal, mask, score))
        problem = Problem(spec, 2, 2, 1, *lengths)
        assert_close(tiled(problem, 8, 16), problem.dense(), BF16)


def test_rows_that_see_nothing_have_no_part_in_anything():
    spec = Spec(16, 16, **traced(False, "nothing", "root"))
    arrays = tiled(Problem(spec, 1, 2, 1, 20, 30))
    assert np.all(arrays["lse"] == -np.inf)
    assert all(np.all(arrays[name] == 0) for name in ("o", "dq", "dk", "dv"))


def test_scores_of_what_does_not_exist_may_be_infinite():
    """log and 1 / x of the zeros behind the ends of the sequences, whose derivatives are infinite too."""
    problem = Problem(Spec(16, 16, F16, **traced(True, "left", "infinite")), 1, 2, 1, 21, 30)
    arrays = tiled(problem)
    assert all(np.isfinite(arrays[name]).all() for name in ("o", "dq", "dk", "dv"))
    assert_close(arrays, problem.dense(), F16, ("o", "lse", "dv"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_and_keys_behind_the_ends_have_no_part_whatever_they_score(deterministic):
    """Their zero scores become 1000, of which exp2 is infinite, and infinite times zero is no number."""
    problem = Problem(Spec(16, 16, deterministic=deterministic, **traced(False, None, "far above")), 1, 2, 1, 21, 30)
    compare(problem, plans(problem, Choice(1, 1, 16, (1, 1))))
    assert_close(tiled(problem, 8, 16), problem.dense(), BF16)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_functions_on_the_toy_chip(data):
    """Drawn masks and scores, shapes, head dims and plans: both interpreters, and dense attention."""
    draw = data.draw
    names = {"mask": draw(st.sampled_from([None, *MASKS])), "score": draw(st.sampled_from([None, *TAME]))}
    causal = draw(st.sampled_from([True, False, "top-left"]))
    side = st.none() | st.integers(0, 12)
    window = draw(st.none() | st.tuples(side, side))
    softcap = draw(st.none() | st.floats(0.5, 20))
    dims = st.sampled_from([8, 16, 24])
    dtype, deterministic = draw(st.sampled_from([BF16, F16])), draw(st.booleans())
    fields = traced(causal, **names, window=window, softcap=softcap)
    spec = Spec(draw(dims), draw(dims), dtype, deterministic=deterministic, **fields)
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    length = st.integers(1, 40)
    problem = Problem(spec, 2, heads_kv * group, heads_kv, draw(length), draw(length))
    assert_close(tiled(problem, 8, 16), problem.dense(), dtype)
    chosen = plans(problem, Choice(draw(st.sampled_from([1, 2])), 1, 16, draw(st.sampled_from([(1, 1), (2, 2)]))))
    if chosen is not None:
        compare(problem, chosen)


HOPPER = [
    {"causal": True, "window": (70, None)},
    {"causal": False, "window": (40, 30), "softcap": 2.0},
    {"causal": "top-left", "score": "alibi"},
    {"causal": True, "score": "masking", "mask": "chunked"},
    {"causal": False, "mask": "by head", "score": "gate"},
    {"causal": False, "mask": "strided", "score": "root"},
    {"causal": False, "mask": "prefix"},
    {"causal": False, "mask": "nothing"},
]


@pytest.mark.parametrize("options", HOPPER, ids=str)
@pytest.mark.parametrize(("packed", "guess"), [(1, True), (2, True), (1, False)])
def test_the_hopper_forward_equals_its_tile_form(options, packed, guess):
    spec = Spec(16, 32, packed=packed, **traced(**options))
    kernel, chosen = lowered(spec, warpgroups=2, traits=("dynamic", "in turns", *["guessed maximum"] * guess))
    case = Problem(spec, 1, 2, 1, 150, 200)
    equals_tile(spec, case, kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("options", HOPPER, ids=str)
@pytest.mark.parametrize("dims", [128, 192])
def test_the_hopper_backward_equals_its_tile_form(options, dims):
    spec = Spec(dims, dims, deterministic=dims > 128, **traced(**options))
    case = Problem(spec, 1, 2, 1, 150, 200)
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if spec.deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))
