"""Packed sequences with sinks and with dropout on both interpreters, against dense float64 attention of each."""

from dataclasses import replace

import numpy as np
import pytest
from functions import traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled
from test_sinks import sums
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile
from varlen_cases import Sequences, assert_close

from flashgen import build
from flashgen.attention import backward as nests
from flashgen.interp import machine
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.spec import Spec

MODES = {"sinks": {"sinks": F32}, "dropout": {"dropout": True}, "both": {"sinks": F32, "dropout": True}}
FUNCTIONS = [(None, None), ("left", None), (None, "gate"), ("of batches", "alibi"), ("document", "bias")]
SHAPES = [((5, 0, 8, 21, 0, 1), (9, 4, 8, 30, 0, 17)), ((16, 3, 0), (0, 0, 12)), ((40,), (19,)), ((1,) * 9, (2,) * 9)]
QUERIES, KEYS = (5, 0, 70, 130, 0, 1), (9, 40, 8, 200, 0, 170)


def assert_dsinks(problem, arrays, expected):
    """Each the sum of a number of every row, in which O and its product with dO are rounded."""
    unit = 2.0**-8 if problem.spec.dtype == BF16 else 2.0**-11
    bound = unit * (1 + problem.seqlen_q**0.5)
    np.testing.assert_allclose(arrays["dsinks"], expected["dsinks"], rtol=unit, atol=bound)


def check(problem, *blocks):
    arrays, expected = tiled(problem, *blocks), problem.dense()
    assert_close(problem, arrays, expected)
    if problem.spec.sinks:
        assert_dsinks(problem, sums(problem, arrays, *blocks), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_is_attention_by_itself(causal, mode, shape):
    """Sinks far above and below the scores, and infinite ones; rows that see no key; both ways to dq."""
    spec = Spec(16, 8, BF16, causal, deterministic=causal, varlen=True, **MODES[mode])
    check(Sequences(spec, heads=4, heads_kv=2, queries=shape[0], keys=shape[1]), 8, 16)


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_with_functions(mode, mask, score):
    spec = Spec(16, 16, BF16, varlen=True, **MODES[mode], **traced(True, mask, score))
    check(Sequences(spec, heads=2, queries=(5, 21, 0, 13), keys=(9, 30, 4, 7)), 8, 16)


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_are_not_used(mode):
    spec = Spec(16, 8, F16, True, varlen=True, used=True, **MODES[mode])
    check(Sequences(spec, heads=2, queries=(5, 9, 4, 3), keys=(9, 40, 4, 21), used=(0, 18, 4, 20)), 8, 16)


def test_a_sequence_drops_the_same_whatever_is_beside_it():
    """Its number counts, not where its rows lie."""
    spec = Spec(16, 16, F16, True, varlen=True, dropout=True)
    one = Sequences(spec, heads=2, queries=(0, 21), keys=(0, 30))
    other = Sequences(spec, heads=2, queries=(13, 21, 5), keys=(40, 30, 9))
    for name in ("q", "k", "v", "dout", "dlse"):
        other.of(other.arrays, name, 1)[...] = one.of(one.arrays, name, 1)
    found, expected = tiled(other, 8, 16), tiled(one, 8, 16)
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(other.of(found, name, 1), one.of(expected, name, 1), err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_machine_does_the_same(mode, deterministic):
    spec = Spec(16, 16, F16, True, deterministic, varlen=True, **MODES[mode])
    problem = Sequences(spec, heads=2, queries=(5, 0, 16, 21, 0, 1), keys=(9, 4, 8, 37, 0, 17), foreign=(2,))
    chosen = plans(problem, Choice(2, 1, 16, (2, 2)))
    assert chosen is not None
    problem.padding = chosen["attention_backward"].sizes["block_q"]
    compare(problem, chosen)


@pytest.mark.parametrize("packed", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_the_hopper_forward_equals_its_tile_form(mode, packed):
    spec = Spec(16, 32, packed=packed, varlen=True, causal=True, **MODES[mode])
    traits = ("dynamic", "in turns", *(() if spec.dropout else ("guessed maximum",)))
    kernel, chosen = lowered(spec, warpgroups=2, traits=traits)
    case = Sequences(spec, heads=2, heads_kv=1, queries=QUERIES, keys=KEYS, foreign=(2,))
    equals_tile(spec, case, kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("dims", [64, 192])
def test_the_hopper_backward_drops_as_its_tile_form(dims):
    spec = Spec(dims, dims, causal=True, deterministic=dims > 128, varlen=True, dropout=True)
    case = Sequences(spec, heads=2, heads_kv=1, queries=QUERIES, keys=KEYS, foreign=(2,))
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if spec.deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


@pytest.mark.parametrize(("dims", "deterministic"), [(64, False), (64, True), (192, False)])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_all_kernels_of_a_call_one_after_another(arch, dims, deterministic):
    spec = Spec(dims, dims, BF16, True, deterministic, varlen=True, used=True, sinks=F32, dropout=True)
    keys = (9, 40, 8, 100, 0, 60)
    used = tuple(length // 2 for length in keys)
    case = Sequences(spec, heads=4, heads_kv=2, queries=(5, 0, 70, 90, 0, 1), keys=keys, used=used)
    stages = build.everything(spec, ARCHES[arch])
    arrays = {**case.arrays, **case.outputs(stages["attention_backward"].plan.sizes | {"block_kv": 64})}
    for item in stages.values():
        machine.run(item.machine, item.plan, arrays, case.scalars)
    expected = case.dense()
    assert_close(case, arrays, expected)
    assert_dsinks(case, arrays, expected)


def test_no_query_has_no_part_in_the_gradient_of_a_sink():
    """Nothing writes the vectors then, and nothing reads them."""
    spec = Spec(16, 8, BF16, varlen=True, sinks=F32)
    for queries, keys in (((), ()), ((0, 0), (5, 0))):
        problem = Sequences(spec, heads=2, queries=queries, keys=keys)
        arrays = sums(problem, tiled(problem, 8, 16), 8, 16)
        np.testing.assert_array_equal(arrays["dsinks"], np.zeros((1, 1, 2)))


def test_rows_of_no_sequence_are_marked_for_the_sums_of_sinks_alone():
    spec = Spec(16, 16, varlen=True)
    assert nests.delta(spec) != nests.delta(replace(spec, sinks=F32))
    dense = Spec(16, 16)
    assert nests.delta(dense) == nests.delta(replace(dense, sinks=F32))
