"""Packed sequences with sinks and dropout through the API on the CPU: torch's autograd, NumPy, and refusals."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import packed_denominators  # noqa: E402
from test_api_refusals import refused  # noqa: E402
from test_api_varlen import inputs  # noqa: E402

import flashgen  # noqa: E402
from flashgen import scores  # noqa: E402

P, SEED, OFFSET = 0.25, 2**63 + 17, 2**32 - 1
GIVEN = {"dropout_p": P, "dropout_seed": SEED, "dropout_offset": OFFSET}
OPTIONS = {
    "plain": {},
    "window and softcap": {"causal": True, "window": (9, 3), "softcap": 2.0},
    "alibi": {"score_mod": scores.alibi, "deterministic": True},
}


@pytest.fixture
def sinks():
    return torch.tensor([0.3, -1.0, 2.5, 0.0])


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_autograd(options, dtype, dropout, sinks):
    arrays, told = inputs()
    kernel = flashgen.compile(16, **{"causal": False} | OPTIONS[options], varlen=True, sinks=True, dropout=dropout)
    given = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    if dropout:
        given |= {"keep": torch.from_numpy(flashgen.dropout_mask(SEED, OFFSET, P, 5, 4, 40, 33)), "p": P}

    def attend(q, k, v, t):
        return kernel(q, k, v, *told, sinks=t, return_lse=True, **(GIVEN if dropout else {}))

    offsets = [of.tolist() for of in told]
    assert not packed_denominators.failures(attend, arrays, sinks.to(dtype), *offsets, **given)


def test_the_function_is_the_kernel(sinks):
    (q, k, v, _), told = inputs()
    used = torch.tensor([7, 3, 20, 0, 0], dtype=torch.int32)
    kernel = flashgen.compile(16, True, varlen=True, sinks=True, dropout=True)
    expected = kernel(q, k, v, *told, sinks=sinks, seqused_k=used, **GIVEN)
    found = flashgen.varlen_attention(q, k, v, *told, causal=True, sinks=sinks, seqused_k=used, **GIVEN)
    assert torch.equal(found, expected)
    host = [x.float().numpy().astype(np.float16) for x in (q, k, v)]
    half = flashgen.compile(16, True, dtype="float16", varlen=True, sinks=True, dropout=True)
    o, lse = half.forward(*host, *(x.numpy() for x in told), sinks=sinks.numpy(), **GIVEN)
    found = half.backward(*host, o, lse, o, None, *(x.numpy() for x in told), sinks=sinks.numpy(), **GIVEN)
    assert [x.shape for x in found] == [*(x.shape for x in host), (4,)]


def test_a_padded_batch_drops_the_same():
    """The number of a sequence is that of the batch: packed and padded calls with one seed agree."""
    q, k, v = (torch.randn(3, 20, 2, 16, dtype=torch.float16) for _ in range(3))
    told = (torch.arange(4, dtype=torch.int32) * 20,) * 2
    flat = (x.flatten(0, 1) for x in (q, k, v))
    expected = flashgen.attention(q, k, v, True, **GIVEN)
    assert torch.equal(flashgen.varlen_attention(*flat, *told, causal=True, **GIVEN).unflatten(0, (3, 20)), expected)


def test_nothing_dropped_is_the_kernel_without_dropout(sinks):
    (q, k, v, _), told = inputs()
    kernel, plain = (flashgen.compile(16, varlen=True, dropout=dropout) for dropout in (True, False))
    assert kernel.resolve(dropout_p=0.0)[0] is plain
    assert torch.equal(kernel(q, k, v, *told, dropout_p=0.0), plain(q, k, v, *told))


def test_no_rows(sinks):
    kernel = flashgen.compile(16, varlen=True, sinks=True)
    for queries, keys in (((0, 0), (5, 0)), ((3, 4), (0, 0))):
        (q, k, v, do), told = inputs(queries, keys)
        o, lse = kernel.forward(q, k, v, *told, sinks=sinks)
        assert torch.equal(lse, sinks[:, None].expand(4, sum(queries)))
        dsinks = kernel.backward(q, k, v, o, lse, do, torch.ones_like(lse), *told, sinks=sinks)[3]
        assert torch.equal(dsinks, torch.full((4,), 1.0 * sum(queries)))


def test_workspace_bytes():
    kernel, plain = (flashgen.compile(64, varlen=True, arch="sm_80", sinks=sinks) for sinks in (True, False))
    block_q = kernel.plan["attention_backward"].sizes["block_q"]
    rows = (1000 // block_q + 7) * block_q
    sizes = {"batch": 7, "total_q": 1000, "heads": 3}
    assert kernel.workspace_bytes(**sizes) - plain.workspace_bytes(**sizes) == 4 * 3 * -(-rows // 64)


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        ({}, ["takes sinks", "sinks=t"]),
        ({"sinks": torch.zeros(3)}, ["sinks has shape (3,)", "(4,)"]),
        ({"sinks": torch.zeros(4), "dropout_p": 0.5}, ["no dropout_seed"]),
        ({"sinks": torch.zeros(4), "dropout_p": 1.0, "dropout_seed": 1}, ["dropout_p = 1.0", "less than 1"]),
        ({"sinks": torch.zeros(4), "block_mask": 1}, ["block_mask", "sequences of one length"]),
    ],
    ids=str,
)
def test_what_is_refused(given, mentions):
    (q, k, v, _), told = inputs()
    kernel = flashgen.compile(16, varlen=True, sinks=True, dropout=True)
    refused(kernel, q, k, v, *told, **{"dropout_p": 0.0} | given, mentions=mentions)


def test_what_was_not_asked_for_is_refused(sinks):
    (q, k, v, _), told = inputs()
    kernel = flashgen.compile(16, varlen=True)
    refused(kernel, q, k, v, *told, sinks=sinks, mentions=["compiled without", "sinks=True"])
    refused(kernel, q, k, v, *told, **GIVEN, mentions=["compiled without", "dropout=True"])
    refused(flashgen.varlen_attention, q, k, v, *told, dropout_p=0.1, mentions=["no dropout_seed"])
