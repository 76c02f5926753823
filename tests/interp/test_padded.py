"""`seqused_k` of batches of one length on both interpreters, against dense float64 attention of the used keys."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import assert_close
from functions import traced
from lowered_cases import Choice, compare, plans
from padded_cases import Padded
from test_functions import tiled
from test_sinks import sums
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile

from flashgen import build, lower
from flashgen.attention import backward as nests
from flashgen.attention import forward as forward_nest
from flashgen.interp import machine, tile
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.spec import Spec

FUNCTIONS = [("left", None), ("both sides", "softcap"), (None, "alibi"), ("chunked", "gate"), ("document", "bias")]
USED = (30, 0, 17, 1, 16)  # all keys, none, some of a block, one, whole blocks
MORE = {"sinks": {"sinks": F32}, "dropout": {"dropout": True}}
ALL = ("dynamic", "in turns", "guessed maximum")


def check(problem, *blocks):
    arrays, expected = tiled(problem, *blocks), problem.dense()
    assert_close(arrays, expected, problem.spec.dtype)
    if problem.spec.sinks:
        unit, rows = 2.0**-8, problem.batches * problem.seqlen_q
        found = sums(problem, arrays, *blocks)["dsinks"]
        np.testing.assert_allclose(found, expected["dsinks"], rtol=unit, atol=unit * (1 + rows**0.5))
    return arrays


@pytest.mark.parametrize("seqlen_q", [1, 21, 40])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_every_batch_has_keys_of_its_own(causal, deterministic, seqlen_q):
    """The diagonal is that of the keys that are used; what lies behind is NaN, and its gradients are zero."""
    spec = Spec(16, 8, BF16, causal, deterministic, used=True)
    arrays = check(Padded(spec, heads=4, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=30, used=USED), 8, 16)
    for number, used in enumerate(USED):
        assert all(np.all(arrays[name][number, :, used:] == 0) for name in ("dk", "dv"))
    assert np.all(arrays["lse"][1] == -np.inf) and np.all(arrays["o"][1] == 0)


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_with_functions(causal, mask, score):
    spec = Spec(16, 16, BF16, deterministic=not causal, used=True, **traced(causal, mask, score))
    check(Padded(spec, heads=2, seqlen_q=21, seqlen_k=30, used=USED), 8, 16)


@pytest.mark.parametrize("more", MORE)
def test_with_sinks_and_dropout(more):
    spec = Spec(16, 16, BF16, True, used=True, **MORE[more])
    check(Padded(spec, heads=2, seqlen_q=21, seqlen_k=30, used=USED), 8, 16)


def test_all_keys_are_as_without():
    spec = Spec(16, 16, F16, True, used=True)
    problem = Padded(spec, heads=2, seqlen_q=21, seqlen_k=30, used=(30, 30))
    found = tiled(problem, 8, 16)
    problem.spec = replace(spec, used=False)
    expected = tiled(problem, 8, 16)
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_behind_the_used_keys_are_not_walked(causal):
    """FLOPs and bytes are those of the used keys: a few of many cost what few cost."""
    counts = {}
    for length in (16, 160):
        spec = Spec(16, 16, BF16, causal, used=True)
        problem = Padded(spec, heads=1, seqlen_q=16, seqlen_k=length, used=(16,))
        counter = tile.Counter()
        problem.run_tile(8, 16, listener=counter, kernels=[lower.tile(kernel) for kernel in problem.kernels()])
        counts[length] = counter.flops, counter.global_bytes_read
    assert counts[16] == counts[160]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("choice", [Choice(2, 1, 16, (2, 2)), Choice(1, 2, 16, (1, 2))], ids=str)
def test_the_machine_does_the_same(choice, causal, deterministic):
    problem = Padded(Spec(16, 16, F16, causal, deterministic, used=True), heads=2, seqlen_q=21, seqlen_k=30, used=USED)
    chosen = plans(problem, choice)
    assert chosen is not None
    compare(problem, chosen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("traits", [(), ("persistent",), ("dynamic",), ALL])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_the_hopper_forward_equals_its_tile_form(warpgroups, traits, causal):
    traits = tuple(trait for trait in traits if trait != "in turns" or warpgroups > 1)
    spec = Spec(16, 32, BF16, causal, used=True)
    kernel, chosen = lowered(spec, warpgroups=warpgroups, traits=traits)
    equals_tile(spec, Padded(spec, heads=2, seqlen_q=150, seqlen_k=200, used=(200, 0, 77)), kernel, chosen, seeds=(0,))


@pytest.mark.parametrize(("mask", "score"), FUNCTIONS[:3])
def test_the_hopper_forward_with_functions(mask, score):
    spec = Spec(16, 16, BF16, used=True, **traced(True, mask, score))
    kernel, chosen = lowered(spec, warpgroups=2, traits=ALL)
    equals_tile(spec, Padded(spec, heads=2, seqlen_q=70, seqlen_k=200, used=(200, 0, 77)), kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("packed", [2, 4])
def test_heads_that_share_a_tile(packed):
    spec = Spec(16, 16, BF16, True, packed=packed, used=True)
    kernel, chosen = lowered(spec, warpgroups=2, traits=ALL)
    problem = Padded(spec, heads=8, heads_kv=2, seqlen_q=5, seqlen_k=200, used=(200, 0, 77, 3))
    equals_tile(spec, problem, kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dims", "deterministic"), [((64, 64), False), ((72, 128), True), ((192, 192), True)])
def test_the_hopper_backward_equals_its_tile_form(dims, deterministic, causal):
    spec = Spec(*dims, BF16, causal, deterministic, used=True)
    case = Padded(spec, heads=2, heads_kv=1, seqlen_q=150, seqlen_k=200, used=(200, 0, 77))
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


@pytest.mark.parametrize(("dims", "deterministic"), [(64, False), (64, True), (192, False)])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_all_kernels_of_a_call_one_after_another(arch, dims, deterministic):
    spec = Spec(dims, dims, BF16, True, deterministic, used=True, sinks=F32, dropout=True)
    case = Padded(spec, heads=2, heads_kv=1, seqlen_q=90, seqlen_k=100, used=(100, 0, 41))
    stages = build.everything(spec, ARCHES[arch])
    arrays = {**case.arrays, **case.outputs(stages["attention_backward"].plan.sizes | {"block_kv": 64})}
    for item in stages.values():
        machine.run(item.machine, item.plan, arrays, case.scalars)
    assert_close(arrays, case.dense(), BF16)


def test_kernels_without_keys_do_not_know():
    spec = Spec(16, 16, used=True)
    for nest in (nests.delta, nests.convert_dq):
        assert nest(spec) == nest(replace(spec, used=False))
    assert forward_nest.forward(spec).buffers[-1].name == "seqused_k"
