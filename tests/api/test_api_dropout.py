"""`dropout`: a call drops what `dropout_mask` says, its gradients are those of autograd, refusals are sentences."""

import struct

import denominators
import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import scores
from flashgen.kernel import programs
from flashgen.plan.arch import parse_arch
from flashgen.runtime import dropping, launch
from flashgen.runtime.arguments import Problem
from flashgen.runtime.call import Call

torch = pytest.importorskip("torch")
P, SEED, OFFSET = 0.25, 2**63 + 17, 2**32 - 1
GIVEN = {"dropout_p": P, "dropout_seed": SEED, "dropout_offset": OFFSET}


@pytest.fixture
def inputs():
    return support.random_inputs(2, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")


@pytest.mark.parametrize("lengths", [(21, 30), (30, 13)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window": (9, 3), "softcap": 2.0}, {"score_mod": scores.alibi, "deterministic": True}],
    ids=["plain", "softcap", "alibi"],
)
def test_gradients_are_those_of_autograd(options, lengths):
    arrays = support.random_inputs(2, *lengths, 4, 2, 16, dtype=torch.float16, device="cpu")
    sinks = torch.tensor([0.3, -1.0, 2.5, 0.0])
    kernel = flashgen.compile(16, **{"causal": False} | options, dtype="float16", sinks=True, dropout=True)
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    keep = torch.from_numpy(flashgen.dropout_mask(SEED, OFFSET, P, 2, 4, *lengths))

    def attend(q, k, v, t):
        return kernel(q, k, v, sinks=t, return_lse=True, **GIVEN)

    assert not denominators.failures(attend, *arrays, sinks, keep=keep, p=P, **functions)


def test_attention_numpy_and_layouts(inputs):
    q, k, v, do = inputs
    kernel = flashgen.compile(16, True, dtype="float16", dropout=True)
    expected = kernel(q, k, v, **GIVEN)
    assert torch.equal(flashgen.attention(q, k, v, True, **GIVEN), expected)
    assert not torch.equal(flashgen.attention(q, k, v, True, dropout_p=P, dropout_seed=SEED), expected)
    np.testing.assert_array_equal(kernel(*(x.numpy() for x in (q, k, v)), **GIVEN), expected.numpy())
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    other = flashgen.compile(16, True, dtype="float16", layout="bhsd", dropout=True)
    assert torch.equal(other(*turned, **GIVEN).transpose(1, 2), expected)
    o, lse = kernel.forward(q, k, v, **GIVEN)
    again = kernel.backward(q, k, v, o, lse, do, **GIVEN)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(kernel(*leaves, **GIVEN), leaves, do)
    assert all(torch.equal(x, y) for x, y in zip(again, found, strict=True))


def test_nothing_dropped_is_the_kernel_without_dropout(inputs):
    q, k, v, do = inputs
    kernel, plain = (flashgen.compile(16, dtype="float16", dropout=dropout) for dropout in (True, False))
    assert kernel.resolve(dropout_p=0.0)[0] is plain
    o, lse = kernel.forward(q, k, v, dropout_p=0.0)
    assert torch.equal(o, plain(q, k, v)) and torch.equal(kernel(q, k, v, dropout_p=0, dropout_seed=3), o)
    found = kernel.backward(q, k, v, o, lse, do, dropout_p=0.0)
    assert all(torch.equal(x, y) for x, y in zip(found, plain.backward(q, k, v, o, lse, do), strict=True))
    assert torch.equal(flashgen.attention(q, k, v, dropout_p=0.0, dropout_seed=1), flashgen.attention(q, k, v))


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        ({}, ["takes dropout_p", "dropout_seed"]),
        ({"dropout_p": 0.1}, ["no dropout_seed"]),
        ({"dropout_p": 1.0, "dropout_seed": 1}, ["dropout_p = 1.0", "less than 1"]),
        ({"dropout_p": -0.1, "dropout_seed": 1}, ["dropout_p = -0.1", "at least 0"]),
        ({"dropout_p": float("nan"), "dropout_seed": 1}, ["dropout_p = nan"]),
        ({"dropout_p": True, "dropout_seed": 1}, ["dropout_p", "bool"]),
        ({"dropout_p": torch.tensor(0.1), "dropout_seed": 1}, ["dropout_p", "Tensor"]),
        ({"dropout_p": 0.1, "dropout_seed": 2**64}, ["dropout_seed = ", "2^64 - 1"]),
        ({"dropout_p": 0.1, "dropout_seed": -1}, ["dropout_seed = -1"]),
        ({"dropout_p": 0.1, "dropout_seed": 1.5}, ["dropout_seed = 1.5", "integer"]),
        ({"dropout_p": 0.1, "dropout_seed": 1, "dropout_offset": 2**32}, ["dropout_offset = ", "2^32 - 1"]),
    ],
)
def test_what_is_refused(inputs, given, mentions):
    q, k, v, _ = inputs
    refused(flashgen.compile(16, dtype="float16", dropout=True), q, k, v, **given, mentions=mentions)
    if given:
        refused(flashgen.attention, q, k, v, **given, mentions=mentions)


def test_dropout_that_was_not_asked_for(inputs):
    q, k, v, _ = inputs
    kernel = flashgen.compile(16, dtype="float16")
    refused(kernel, q, k, v, dropout_p=0.5, dropout_seed=1, mentions=["compiled without", "dropout=True"])
    for wrong in (0.5, 1, None):
        refused(flashgen.compile, 16, dropout=wrong, mentions=["dropout = ", "dropout_p"])
    refused(flashgen.dropout_mask, 1, 0, 0.5, 1, 1, -1, 4, mentions=["(1, 1, -1, 4)", "negative"])


def test_more_batches_than_one_launch_has_are_refused():
    q = k = v = torch.zeros(65536, 1, 1, 16, dtype=torch.float16)
    refused(flashgen.attention, q, k, v, dropout_p=0.5, dropout_seed=1, mentions=["batch = 65536", "split"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_each_launch_is_told_its_own(arch, monkeypatch):
    """A call of known shapes is bound once; seeds and probabilities come with the addresses."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 4)
    kernel = flashgen.compile(64, arch=arch, dropout=True)
    call = Call(Problem(3, 4, 2, 300, 70, 64, 64, ()), 1.0, (3, 300, 4, 64), (3, 4, 300), 0, True)
    tiles = dict.fromkeys(("q", "k", "v", "o", "dout"), (4 * 300 * 64, 64, 256))
    for stage, places in (("forward", (0,)), ("backward", (1,))):
        bound = kernel._launches(stage, programs(stage, kernel.spec, parse_arch(arch)), call, tiles)
        for place in places:
            one = bound[place]
            names = [scalar.name for scalar in one.program.stages.machine.scalars]
            first = names.index("dropout_seed_low")
            assert names[first : first + 5] == [item.name for item in dropping.dropout.SCALARS]
            pointers = tuple(4096 * (1 + n) for n in range(len(one.offsets)))
            one.maps = {}
            template = bytes(one.template)
            for drop in (dropping.Drop(P, SEED, OFFSET), dropping.Drop(0.5, 1, 0)):
                args = one._args(pointers, 0, 0, drop)
                low, high, offset, below, scale = struct.unpack_from("<IIIif", args, one.late)
                assert (high << 32) + low == drop.seed and offset == drop.offset
                assert below == round((1 - drop.p) * 2**32) - 2**31
                assert scale == np.float32(1 / (1 - drop.p))
                assert args[one.late + 20 :] == template[one.late + 20 :]
    delta = kernel._launches("backward", programs("backward", kernel.spec, parse_arch(arch)), call, tiles)[0]
    assert delta.late is None
