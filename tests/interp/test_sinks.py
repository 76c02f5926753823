"""Attention sinks on both interpreters, forward and backward, against dense float64 attention."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from functions import traced
from lowered_cases import Choice, assert_same, compare, copies, machine_equals_tile, plans
from test_functions import tiled
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile

from flashgen import lower
from flashgen.attention import backward as nests
from flashgen.attention import sinks
from flashgen.interp import tile
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

FUNCTIONS = [(None, None), ("left", None), (None, "gate"), ("by head", "wave"), ("document", "bias")]
ALL = ("dynamic", "in turns", "guessed maximum")


def sums(problem, arrays, *blocks):
    """The kernels of dsinks behind the others."""
    for make in (sinks.partial_sums, sinks.gradient):
        tile.run(lower.tile(make(problem.spec)), problem.dims(*blocks), arrays, problem.scalars)
    return arrays


def check(problem, *blocks):
    arrays, expected = sums(problem, tiled(problem, *blocks), *blocks), problem.dense()
    assert_close(arrays, expected, problem.spec.dtype)
    unit = 2.0**-8 if problem.spec.dtype == BF16 else 2.0**-11
    rows = problem.batches * problem.seqlen_q  # delta of each has O and its product with dO rounded
    np.testing.assert_allclose(arrays["dsinks"], expected["dsinks"], rtol=unit, atol=unit * rows**0.5)
    return arrays


@pytest.mark.parametrize("lengths", [(21, 30), (30, 13), (5, 0)], ids=str)
@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_loop_nests_equal_dense_attention(causal, mask, score, lengths):
    """Sinks among the scores and far from them, grouped heads, rows that see no key."""
    spec = Spec(16, 8, BF16, deterministic=causal, sinks=F32, **traced(causal, mask, score))
    check(Problem(spec, 2, 4, 2, *lengths), 8, 16)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sinks_of_the_storage_type(dtype):
    check(Problem(Spec(16, 16, dtype, causal=True, sinks=dtype), 2, 4, 2, 21, 30), 8, 16)


def test_a_query_that_sees_no_key_leaves_its_sink():
    """o = 0, lse = t, no gradient to q, k and v; to t that of the LSE, by which it is a sum of dlse."""
    problem = Problem(Spec(16, 16, sinks=F32, **traced(False, "nothing", None)), 2, 4, 2, 20, 30)
    arrays = sums(problem, tiled(problem), 8, 8)
    given = problem.arrays["sinks"]
    np.testing.assert_array_equal(arrays["lse"], np.broadcast_to(given[:, None], arrays["lse"].shape))
    assert all(np.all(arrays[name] == 0) for name in ("o", "dq", "dk", "dv"))
    expected = np.where(np.isfinite(given), problem.arrays["dlse"].sum((0, 2)), 0.0)
    np.testing.assert_allclose(arrays["dsinks"][0, 0], expected, rtol=1e-5, atol=1e-5)


def test_a_sink_of_minus_infinity_is_none():
    spec = Spec(16, 16, causal=True, sinks=F32)
    problem, without = (Problem(item, 2, 4, 2, 30, 21) for item in (spec, replace(spec, sinks=None)))
    problem.arrays["sinks"][...] = -np.inf
    arrays, expected = sums(problem, tiled(problem), 8, 8), tiled(without)
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
    assert np.all(arrays["dsinks"] == 0)


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_machine_computes_the_same(mask, score, deterministic):
    spec = Spec(16, 16, F16, deterministic=deterministic, sinks=F16, **traced(True, mask, score))
    problem = Problem(spec, 1, 2, 1, 21, 30)
    compare(problem, plans(problem, Choice(2, 1, 16, (2, 2))))


@pytest.mark.parametrize(("lengths", "heads"), [((300, 30), 3), ((70, 20), 70), ((0, 30), 2)], ids=str)
def test_the_machine_adds_up_the_same(lengths, heads):
    """More stretches than a tile has rows, more heads too, and none."""
    spec, arch = Spec(16, 16, sinks=F32), parse_arch("sm_80")
    problem = Problem(spec, 37 if heads < 10 else 1, heads, 1, *lengths)
    rng = np.random.default_rng(0)
    made = [make(spec) for make in (sinks.partial_sums, sinks.gradient)]
    chosen = [planner.plan_sums(kernel, spec, arch) for kernel in made]
    arrays = {**problem.arrays, **problem.outputs(chosen[0].sizes | {"head_dim": 16})}
    for name in ("lse_log2", "delta"):
        arrays[name][..., : lengths[0]] = rng.standard_normal(arrays[name].shape)[..., : lengths[0]]
    arrays["lse_log2"] += 50.0  # above every sink
    for kernel, plan in zip(made, chosen, strict=True):
        before = copies(arrays)
        tile.run(lower.tile(kernel), plan.sizes, arrays, problem.scalars)
        machine_equals_tile(lower.run(kernel, plan), plan, problem, before, arrays)
    share = np.exp2(problem.arrays["sinks"][:, None] * np.log2(np.e) - arrays["lse_log2"][..., : lengths[0]])
    expected = -np.sum(share * arrays["delta"][..., : lengths[0]], axis=(0, 2))
    assert_same("dsinks", arrays["dsinks"][0, 0], expected, BF16)


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS[:4])
@pytest.mark.parametrize("packed", [1, 2])
def test_the_hopper_forward_equals_its_tile_form(mask, score, packed):
    """With the guess of the maximum, whose offset the epilogue ends with; rows without keys among them."""
    spec = Spec(16, 32, packed=packed, sinks=F32, **traced(True, mask, score))
    kernel, chosen = lowered(spec, warpgroups=2, traits=ALL)
    equals_tile(spec, Problem(spec, 1, 2, 1, 200, 150), kernel, chosen, seeds=(0,))


def test_every_row_of_packed_heads_has_its_own_sink():
    spec = Spec(16, 16, packed=2, causal=True, sinks=F32)
    problem = Problem(spec, 2, 4, 2, 5, 30)
    arrays = problem.run_tile(16, 16, kernels=problem.kernels()[:1])
    assert_close(arrays, problem.dense(), BF16, ("o", "lse"))


@pytest.mark.parametrize("dims", [64, 192])
def test_the_hopper_backward_is_that_without_sinks(dims):
    """P = exp(s - lse), whatever the lse counts in."""
    spec = Spec(dims, dims, causal=True, deterministic=dims > 128, sinks=F32)
    assert nests.backward(spec) == nests.backward(replace(spec, sinks=None))
    backward_equals_tile(Problem(spec, 1, 2, 1, 150, 200), nests.backward(spec), seeds=(0,))
