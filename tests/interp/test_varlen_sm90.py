"""Packed sequences by Hopper's kernels on the machine interpreter, against the tile interpreter."""

import pytest
from functions import traced
from test_sm90 import ALL, equals_tile, lowered, run
from test_sm90_backward import equals_tile as backward_equals_tile
from varlen_cases import Sequences, assert_close

from flashgen import build
from flashgen.attention import backward as nests
from flashgen.attention.forward import forward
from flashgen.interp import machine
from flashgen.ir.dtype import BF16, F16
from flashgen.ir.visit import statements
from flashgen.machine.sm90 import PassOver, PublishTile, SettleNumbers
from flashgen.plan.arch import ARCHES
from flashgen.spec import Spec

QUERIES, KEYS = (5, 0, 70, 130, 0, 1), (9, 40, 8, 200, 0, 170)


def sequences(spec, **more):
    sizes = {"heads": 2, "heads_kv": 1, "queries": QUERIES, "keys": KEYS}
    sizes |= more
    used = tuple(length // 2 for length in sizes["keys"]) if spec.used else ()
    return Sequences(spec, **sizes, used=used)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("traits", [("dynamic",), ("persistent",), ALL])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_the_forward_equals_its_tile_form(warpgroups, traits, causal, used):
    if warpgroups == 1 and "in turns" in traits:
        traits = tuple(trait for trait in traits if trait != "in turns")
    spec = Spec(16, 32, BF16, causal, varlen=True, used=used)
    kernel, chosen = lowered(spec, warpgroups=warpgroups, traits=traits)
    equals_tile(spec, sequences(spec, foreign=(2,)), kernel, chosen)
    passed_over = any(isinstance(stmt, PassOver) for stmt in statements(kernel.body))
    assert passed_over == (causal and warpgroups == 3)


@pytest.mark.parametrize("mask", ["both sides", "left", "document"])
def test_each_warpgroup_goes_through_its_own_blocks(mask):
    spec = Spec(16, 16, BF16, varlen=True, **traced(True, mask, None))
    kernel, chosen = lowered(spec, warpgroups=3, traits=ALL)
    assert any(isinstance(stmt, PassOver) for stmt in statements(kernel.body))
    case = sequences(spec, queries=(5, 0, 250, 130, 0, 1), keys=(9, 40, 600, 200, 0, 170))
    equals_tile(spec, case, kernel, chosen)


@pytest.mark.parametrize("causal", [False, True])
def test_the_forward_is_attention_of_each_sequence(causal):
    spec = Spec(72, 96, F16, causal, varlen=True)
    kernel, chosen = lowered(spec, warpgroups=2)
    case = sequences(spec, foreign=(2,))
    assert_close(case, run(kernel, chosen, case), case.dense(), ("o", "lse"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [2, 4])
def test_heads_that_share_a_tile(packed, causal):
    spec = Spec(16, 16, BF16, causal, packed=packed, varlen=True)
    kernel, chosen = lowered(spec, warpgroups=2)
    case = sequences(spec, heads=8, heads_kv=2, queries=(5, 0, 17, 40, 0, 1), foreign=(2,))
    equals_tile(spec, case, kernel, chosen)
    assert_close(case, run(kernel, chosen, case), case.dense(), ("o", "lse"))


@pytest.mark.parametrize(("mask", "score"), [("both sides", "alibi"), ("document", "softcap"), ("of batches", "gate")])
def test_functions(mask, score):
    spec = Spec(16, 16, BF16, varlen=True, **traced(True, mask, score))
    kernel, chosen = lowered(spec, warpgroups=2, traits=ALL)
    case = sequences(spec)
    equals_tile(spec, case, kernel, chosen, seeds=(0,))
    assert_close(case, run(kernel, chosen, case), case.dense(), ("o", "lse"))


def test_what_is_read_of_a_tile_goes_through_its_place():
    """The computing warps read no offsets; what they compute of lengths does not run ahead of the scores."""
    kernel, _ = lowered(Spec(16, 16, BF16, True, varlen=True), warpgroups=2)
    every = list(statements(kernel.body))
    published = next(stmt for stmt in every if isinstance(stmt, PublishTile))
    assert {"q_begin", "seqlen_q", "seqlen_k"} <= {getattr(value, "name", "") for value in published.values}
    settled = [stmt for stmt in every if isinstance(stmt, SettleNumbers)]
    assert settled and all(stmt.names == ("seqlen_k", "seqlen_q") for stmt in settled)
    assert not any(isinstance(stmt, SettleNumbers) for stmt in statements(lowered(Spec(16, 16))[0].body))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dims", "deterministic"), [((64, 64), False), ((128, 72), False), ((72, 128), True), ((192, 192), True)]
)
def test_the_backward_equals_its_tile_form(dims, deterministic, causal, used):
    spec = Spec(*dims, BF16, causal, deterministic, varlen=True, used=used)
    case = sequences(spec, foreign=(2,))
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


@pytest.mark.parametrize(("mask", "score"), [("both sides", "alibi"), ("document", None), ("of batches", "alibi")])
def test_the_backward_with_functions(mask, score):
    spec = Spec(64, 64, BF16, varlen=True, **traced(True, mask, score))
    backward_equals_tile(sequences(spec), nests.backward(spec), seeds=(0,))


def test_no_row_is_no_block():
    spec = Spec(16, 16, varlen=True)
    kernel, chosen = lowered(spec)
    trace = equals_tile(spec, sequences(spec, queries=(0, 0), keys=(4, 0)), kernel, chosen, seeds=(0,))
    assert trace[0].blocks == 0 and forward(spec).axes[0].name == "row_block"


@pytest.mark.parametrize(
    ("dims", "deterministic"),
    [((64, 64), False), ((64, 64), True), ((192, 192), False), ((128, 128), False), ((128, 64), False)],
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_all_kernels_of_a_call_one_after_another(arch, dims, deterministic):
    """As the planner has them: blocks of dQ's own kernel are others than those of the workspaces."""
    spec = Spec(*dims, BF16, True, deterministic, varlen=True, used=True)
    case = sequences(spec, foreign=(2,), queries=(5, 0, 70, 90, 0, 1), keys=(9, 40, 8, 100, 0, 60))
    stages = build.everything(spec, ARCHES[arch])
    sizes = stages["attention_backward"].plan.sizes
    arrays = {**case.arrays, **case.outputs(sizes)}
    assert case.scalars["padding"] == sizes["block_q"]
    for item in stages.values():
        machine.run(item.machine, item.plan, arrays, case.scalars)
    assert_close(case, arrays, case.dense())
