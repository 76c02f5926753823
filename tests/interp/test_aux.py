"""Kernels whose mask and score functions read arrays, on both interpreters, against dense float64 attention."""

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from functions import MASKS_AND_SCORES, traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile

from flashgen.attention import backward as nests
from flashgen.interp.common import gather
from flashgen.ir.dtype import BF16, F16
from flashgen.spec import Spec

EVERY = [*MASKS_AND_SCORES, ("document", "bias"), ("visible", "buckets")]


@pytest.mark.parametrize("lengths", [(21, 30), (30, 13)], ids=str)
@pytest.mark.parametrize(("mask", "score"), EVERY)
@pytest.mark.parametrize("causal", [False, True])
def test_every_function_that_reads(mask, score, causal, lengths):
    """Ragged lengths and grouped heads; arrays that are permuted, have gaps, and strides of zero."""
    spec = Spec(16, 8, BF16, deterministic=causal, **traced(causal, mask, score))
    problem = Problem(spec, 2, 4, 2, *lengths)
    assert_close(tiled(problem, 8, 16), problem.dense(), BF16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("mask", "score"), EVERY)
def test_the_machine_reads_the_same(mask, score, deterministic):
    spec = Spec(16, 16, F16, deterministic=deterministic, **traced(True, mask, score))
    problem = Problem(spec, 1, 2, 1, 21, 30)
    compare(problem, plans(problem, Choice(2, 1, 16, (2, 2))))


@pytest.mark.parametrize(("mask", "score"), EVERY)
@pytest.mark.parametrize("packed", [1, 2])
def test_the_hopper_forward_equals_its_tile_form(mask, score, packed):
    spec = Spec(16, 32, packed=packed, **traced(True, mask, score))
    kernel, chosen = lowered(spec, warpgroups=2, traits=("dynamic", "in turns", "guessed maximum"))
    equals_tile(spec, Problem(spec, 1, 2, 1, 150, 200), kernel, chosen, seeds=(0,))


@pytest.mark.parametrize(("mask", "score"), EVERY)
def test_heads_that_share_a_tile_read_what_is_theirs(mask, score):
    """A tile of packed heads against dense attention, which knows nothing of tiles."""
    spec = Spec(16, 16, packed=2, **traced(True, mask, score))
    problem = Problem(spec, 2, 4, 2, 5, 30)
    kernels = problem.kernels()[:1]
    arrays = problem.run_tile(16, 16, kernels=kernels)
    assert_close(arrays, problem.dense(), BF16, ("o", "lse"))


@pytest.mark.parametrize(("mask", "score"), [("document", None), (None, "bias"), (None, "relative")])
@pytest.mark.parametrize("dims", [128, 192])
def test_the_hopper_backward_equals_its_tile_form(mask, score, dims):
    spec = Spec(dims, dims, deterministic=dims > 128, **traced(True, mask, score))
    case = Problem(spec, 1, 2, 1, 150, 200)
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if spec.deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


def test_an_index_out_of_range_reads_the_last_of_its_axis():
    array = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(gather(array, [np.array([0, 5, -1]), np.array([1, 1, -7])]), [1, 4, 5])
