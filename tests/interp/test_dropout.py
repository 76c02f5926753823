"""Dropout on both interpreters, forward and backward, against dense float64 attention and the mask of the reference."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import DROPPED, Problem, assert_close
from functions import traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile

import flashgen
from flashgen import lower
from flashgen.attention import backward as nests
from flashgen.attention import forward as forward_nest
from flashgen.interp import philox
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.ir.visit import statements
from flashgen.lower.random import has_random
from flashgen.machine.base import MapFragment, MapQuads
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

FUNCTIONS = [(None, None), ("left", None), (None, "gate"), (None, "alibi"), ("by head", "wave"), ("document", "bias")]
ANSWERS = [  # of the authors' library (Random123, kat_vectors): key, counter, words
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 2, (2**32 - 1,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "expected"), ANSWERS)
def test_philox_gives_the_known_answers(key, counter, expected):
    assert tuple(int(word) for word in philox.words(key, counter)) == expected


def test_the_mask_is_made_of_the_integers_of_its_elements():
    """Those of an element alone, with words by hand; every bit of seed and offset counts, and heads differ."""
    p, seed, offset = DROPPED
    mask = flashgen.dropout_mask(seed, offset, p, 2, 3, 37, 50)
    rows, columns, sequences = np.arange(37)[:, None], np.arange(50), np.arange(6)[:, None, None]
    found = philox.element(seed & 0xFFFFFFFF, seed >> 32, offset, sequences, rows, columns).reshape(2, 3, 37, 50)
    np.testing.assert_array_equal(mask, found < round(0.75 * 2**32) - 2**31)
    words = philox.words((seed & 0xFFFFFFFF, seed >> 32), (2 * 8 + 1, 1 * 8 + 3, 4, offset))
    for q_idx, kv_idx, word in ((19, 33, 0), (19, 41, 1), (27, 33, 2), (27, 41, 3)):
        assert int(words[word]) - (int(words[word]) >> 31 << 32) == found[1, 1, q_idx, kv_idx]
    for other in (seed ^ 1, seed ^ 2**32, seed ^ 2**63):
        assert 0.3 < (flashgen.dropout_mask(other, offset, p, 2, 3, 37, 50) != mask).mean() < 0.45
    assert 0.3 < (flashgen.dropout_mask(seed, offset ^ 2**31, p, 2, 3, 37, 50) != mask).mean() < 0.45
    assert 0.3 < (mask[0] != mask[1]).mean() < 0.45 and 0.3 < (mask[:, 0] != mask[:, 1]).mean() < 0.45


@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.99])
def test_the_mask_keeps_as_many_as_it_says(p):
    mask = flashgen.dropout_mask(11, 0, p, 2, 4, 500, 500)
    assert abs(mask.mean() - (1 - p)) <= 5 * (p * (1 - p) / mask.size) ** 0.5 + 1e-12
    for axis in range(4):  # and evenly
        assert np.abs(mask.mean(tuple({0, 1, 2, 3} - {axis})) - (1 - p)).max() < 0.04


@pytest.mark.parametrize("lengths", [(21, 30), (30, 13)], ids=str)
@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("head_dim", [16, 136])
def test_the_loop_nests_equal_dense_attention(head_dim, mask, score, lengths):
    """Narrow heads and wide ones, whose kernels differ; both ways to dq; blocks that are no multiples of 16 too."""
    for deterministic, causal in ((False, True), (True, False)):
        spec = Spec(head_dim, 8, BF16, deterministic=deterministic, dropout=True, **traced(causal, mask, score))
        problem = Problem(spec, 2, 4, 2, *lengths)
        assert_close(tiled(problem, 8, 24), problem.dense(), BF16)


def test_beside_sinks():
    problem = Problem(Spec(16, 16, F16, causal=True, sinks=F32, dropout=True), 2, 4, 2, 30, 21)
    assert_close(tiled(problem, 8, 16), problem.dense(), F16)


def test_a_query_that_sees_no_key_has_no_part_in_anything():
    arrays = tiled(Problem(Spec(16, 16, dropout=True, **traced(False, "nothing", "gate")), 1, 2, 1, 20, 30))
    assert np.all(arrays["lse"] == -np.inf)
    assert all(np.all(arrays[name] == 0) for name in ("o", "dq", "dk", "dv"))


def test_the_blocks_do_not_matter():
    """The mask is that of the elements: other tiles drop the same."""
    spec = Spec(16, 16, F16, causal=True, dropout=True)
    results = [tiled(Problem(spec, 1, 2, 1, 40, 50), *blocks) for blocks in ((8, 8), (16, 48), (40, 16))]
    for other in results[1:]:
        assert_close(other, results[0], F16)


def test_the_lse_is_that_without_dropout():
    spec = Spec(16, 16, causal=True, dropout=True)
    with_, without = (tiled(Problem(item, 1, 2, 1, 30, 21)) for item in (spec, replace(spec, dropout=False)))
    np.testing.assert_array_equal(with_["lse"], without["lse"])


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_machine_computes_the_same(mask, score, deterministic):
    spec = Spec(16, 16, F16, deterministic=deterministic, dropout=True, **traced(True, mask, score))
    problem = Problem(spec, 1, 2, 1, 21, 30)
    compare(problem, plans(problem, Choice(2, 1, 16, (2, 2))))


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS[:4])
@pytest.mark.parametrize("packed", [1, 2])
def test_the_hopper_forward_equals_its_tile_form(mask, score, packed):
    spec = Spec(16, 32, packed=packed, dropout=True, **traced(True, mask, score))
    kernel, chosen = lowered(spec, warpgroups=2, traits=("dynamic", "in turns"))
    assert any(isinstance(stmt, MapQuads) for stmt in statements(kernel.body)) is (packed == 1)
    equals_tile(spec, Problem(spec, 1, 2, 1, 200, 150), kernel, chosen, seeds=(0,))


@pytest.mark.parametrize(("mask", "score"), [(None, None), (None, "gate")])
@pytest.mark.parametrize("dims", [64, 192])
def test_the_hopper_backward_equals_its_tile_form(mask, score, dims):
    apart = dims > 128 or score is not None
    spec = Spec(dims, dims, deterministic=apart, dropout=True, **traced(True, mask, score))
    case = Problem(spec, 1, 2, 1, 150, 200)
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if spec.deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_step_makes_random_numbers_element_by_element(arch):
    """And none guesses a maximum, since what is dropped would hide that the guess was too low."""
    spec, chip = Spec(64, 64, causal=True, dropout=True), parse_arch(arch)
    for nest in (forward_nest.forward(spec), nests.backward(spec), nests.backward_dq(spec)):
        plan = planner.plan(nest, spec, chip)
        made = list(statements(lower.run(nest, plan).body))
        random = [stmt for stmt in made if isinstance(stmt, MapFragment) and has_random(stmt.expr)]
        assert random and all(isinstance(stmt, MapQuads) for stmt in random)
        assert not plan.has("guessed maximum")
