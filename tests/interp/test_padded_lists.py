"""Lists of blocks with `seqused_k`, sinks and dropout on both interpreters, against dense float64 attention."""

import pytest
from attention_cases import Problem, assert_close
from block_lists import add_lists
from functions import traced
from lowered_cases import Choice, compare, plans
from padded_cases import Padded
from test_functions import tiled
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile
from test_sm90_backward import plan as backward_plan

from flashgen.attention import backward as nests
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.spec import Spec

USED = (70, 0, 37, 1, 32)
MASKS = ["document", "visible", "by head", None]
MODES = {"sinks": {"sinks": F32}, "dropout": {"dropout": True}, "alibi": {"score": "alibi"}}
LISTED = ("dynamic", "in turns", "guessed maximum")


def listed(mask, used, dims=(16, 16), dtype=BF16, causal=False, score=None, **options):
    return Spec(*dims, dtype, listed=True, used=used, **traced(causal, mask, score), **options)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_entries_behind_the_used_keys_are_hidden(mask, deterministic):
    """Blocks that a list has for full too, since the keys of the mask are all there are."""
    blocks = (24, 8) if deterministic else (8, 16)
    problem = Padded(listed(mask, True, deterministic=deterministic), 5, 4, 2, 37, 70, used=USED)
    add_lists(problem, problem.dims(*blocks))
    assert_close(tiled(problem, *blocks), problem.dense(), BF16)


@pytest.mark.parametrize("mask", MASKS[:2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_machine_form_of_the_portable_family(mask, deterministic):
    problem = Padded(listed(mask, True, dtype=F16, deterministic=deterministic), 5, 2, 1, 37, 70, used=USED)
    chosen = plans(problem, Choice(2, 1, 16, (2, 2)))
    add_lists(problem, chosen["attention_forward"].sizes)
    keys = problem.arrays["kv_list"]
    add_lists(problem, chosen["attention_backward"].sizes)
    problem.arrays["kv_list"] = keys
    compare(problem, chosen)


@pytest.mark.parametrize("mask", MASKS[:2])
@pytest.mark.parametrize("packed", [1, 2])
def test_hoppers_forward(mask, packed):
    spec = listed(mask, True, (16, 32), packed=packed)
    kernel, chosen = lowered(spec, warpgroups=2, traits=LISTED)
    problem = Padded(spec, 3, 2, 1, 150, 400, used=(400, 0, 177))
    add_lists(problem, chosen.sizes)
    equals_tile(spec, problem, kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("dims", [64, 192])
def test_hoppers_backward(dims):
    spec = listed("document", True, (dims, dims), deterministic=dims > 128)
    for nest in [nests.backward(spec), *([nests.backward_dq(spec)] if spec.deterministic else [])]:
        case = Padded(spec, 3, 2, 1, 150, 200, used=(200, 0, 77))
        add_lists(case, backward_plan(nest, spec).sizes)
        backward_equals_tile(case, nest, seeds=(0,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", MASKS)
def test_with_sinks_dropout_and_alibi(mask, mode):
    for used in (False, True):
        spec = listed(mask, used, causal=not used, **MODES[mode])
        sizes = (5, 4, 2, 37, 70)
        problem = Padded(spec, *sizes, used=USED) if used else Problem(spec, *sizes)
        add_lists(problem, problem.dims(16, 16))
        assert_close(tiled(problem, 16, 16), problem.dense(), BF16)


@pytest.mark.parametrize("mode", MODES)
def test_hopper_with_sinks_dropout_and_alibi(mode):
    spec = listed("document", True, **MODES[mode])
    traits = LISTED[:2] if spec.dropout else LISTED
    kernel, chosen = lowered(spec, warpgroups=2, traits=traits)
    problem = Padded(spec, 3, 2, 1, 150, 200, used=(200, 0, 77))
    add_lists(problem, chosen.sizes)
    equals_tile(spec, problem, kernel, chosen, seeds=(0,))
