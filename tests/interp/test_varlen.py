"""Packed sequences on both interpreters, against dense float64 attention of each sequence by itself."""

import numpy as np
import pytest
from functions import MASKS_AND_SCORES, traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled
from varlen_cases import Sequences, assert_close

from flashgen.ir.dtype import BF16, F16
from flashgen.spec import Spec

# Lengths of queries and of keys: empty on either side and on both, as long as a block, one more, several blocks.
SHAPES = [
    ((5, 0, 8, 21, 0, 1), (9, 4, 8, 30, 0, 17)),
    ((16, 3, 0), (0, 0, 12)),
    ((40,), (19,)),
    ((0, 0), (3, 0)),
    ((1,) * 9, (2,) * 9),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_is_attention_by_itself(causal, deterministic, shape):
    spec = Spec(16, 8, BF16, causal, deterministic, varlen=True)
    problem = Sequences(spec, heads=4, heads_kv=2, queries=shape[0], keys=shape[1])
    assert_close(problem, tiled(problem, 8, 16), problem.dense())


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_from_sequence_to_sequence(causal):
    problem = Sequences(
        Spec(16, 8, BF16, causal, varlen=True), heads=2, queries=(5, 9, 0, 3), keys=(9, 7, 4, 21), foreign=(1, 2)
    )
    assert_close(problem, tiled(problem, 8, 16), problem.dense())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_that_are_not_used_are_not_looked_at(causal, deterministic):
    spec = Spec(16, 8, BF16, causal, deterministic, varlen=True, used=True)
    problem = Sequences(spec, heads=2, queries=(5, 9, 4, 3), keys=(9, 40, 4, 21), used=(0, 18, 4, 20))
    assert_close(problem, tiled(problem, 8, 16), problem.dense())


@pytest.mark.parametrize(("mask", "score"), [*MASKS_AND_SCORES, ("by head", "alibi"), ("of batches", "gate")])
@pytest.mark.parametrize("causal", [False, True])
def test_functions_count_within_their_sequence(causal, mask, score):
    spec = Spec(16, 16, BF16, varlen=True, deterministic=causal, **traced(causal, mask, score))
    problem = Sequences(spec, heads=2, queries=(5, 21, 0, 13), keys=(9, 30, 4, 7))
    assert_close(problem, tiled(problem, 8, 16), problem.dense())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("choice", [Choice(2, 1, 16, (2, 2)), Choice(1, 2, 16, (1, 2))], ids=str)
def test_the_machine_does_the_same(choice, causal, deterministic, used):
    spec = Spec(16, 16, F16, causal, deterministic, varlen=True, used=used)
    keys = (9, 4, 8, 37, 0, 17)
    problem = Sequences(
        spec,
        heads=2,
        queries=(5, 0, 16, 21, 0, 1),
        keys=keys,
        used=tuple(length // 2 for length in keys) if used else (),
        foreign=(2,),
    )
    chosen = plans(problem, choice)
    assert chosen is not None
    problem.padding = chosen["attention_backward"].sizes["block_q"]
    compare(problem, chosen)


def test_no_sequence_and_no_row():
    problem = Sequences(Spec(16, 8, BF16, varlen=True), queries=(), keys=())
    arrays = tiled(problem, 8, 16)
    assert arrays["o"].shape == (1, 1, 0, 8)
    problem = Sequences(Spec(16, 8, BF16, varlen=True), queries=(0, 0), keys=(5, 0))
    assert np.array_equal(tiled(problem, 8, 16)["dk"], np.zeros((1, 1, 5, 16)))
