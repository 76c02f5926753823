"""Head dims over 256, and values that are columns of the keys: arrays in, results as dense attention gives them."""

from itertools import pairwise

import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import masks, scores
from flashgen.interp import reference

torch = pytest.importorskip("torch")

NAMES = ("causal", "more queries", "window and softcap", "functions")
CASES = [
    ((21, 30), {"causal": True}),
    ((30, 13), {"causal": True}),  # rows that see no key
    ((5, 40), {"causal": False, "window": (9, 3), "softcap": 2.0}),
    ((30, 30), {"causal": "top-left", "score_mod": scores.alibi, "mask_mod": masks.dilated(3)}),
]


def functions_of(kernel):
    return {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(576, 512), (512, 512), (264, 128), (64, 320)])
@pytest.mark.parametrize(("lengths", "options"), CASES, ids=NAMES)
def test_results_are_those_of_dense_attention(head_dim, head_dim_v, lengths, options):
    q, k, v, _ = support.random_inputs(2, *lengths, 4, 1, head_dim, head_dim_v, dtype=torch.bfloat16, device="cpu")
    kernel = flashgen.compile(head_dim, head_dim_v=head_dim_v, **options)
    assert not support.forward_failures(lambda *x: kernel(*x, return_lse=True), q, k, v, **functions_of(kernel))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(("lengths", "options"), CASES, ids=NAMES)
def test_values_that_are_the_first_columns_of_the_keys(layout, lengths, options):
    q, k, _, _ = support.random_inputs(2, *lengths, 4, 1, 576, dtype=torch.float16, device="cpu")
    v = k[..., :512]
    given = (q, k) if layout == "bshd" else (q.transpose(1, 2), k.transpose(1, 2))
    view = v if layout == "bshd" else v.transpose(1, 2)
    for shared, arrays in ((True, given), (False, (*given, view))):
        kernel = flashgen.compile(576, head_dim_v=512, layout=layout, dtype="float16", shared_kv=shared, **options)
        o, lse = kernel(*arrays, return_lse=True)
        o = o if layout == "bshd" else o.transpose(1, 2)
        assert not support.forward_failures(lambda *_: (o, lse), q, k, v, **functions_of(kernel))  # noqa: B023


def test_attention_takes_a_view_of_the_keys_as_values():
    q, k, _, _ = support.random_inputs(1, 9, 20, 4, 1, 576, dtype=torch.bfloat16, device="cpu")

    def attend(q, k, v):
        return flashgen.attention(q, k, v, causal=True, return_lse=True)

    assert not support.forward_failures(attend, q, k, k[..., :512], causal=True)


def test_numpy():
    generator = np.random.default_rng(0)
    q, k = (generator.standard_normal(shape).astype(np.float16) for shape in ((1, 6, 4, 320), (1, 11, 2, 320)))
    kernel = flashgen.compile(320, causal=True, head_dim_v=264, dtype="float16", shared_kv=True)
    o, lse = kernel(q, k, return_lse=True)
    expected, logs = reference.forward(q, k, k[..., :264], causal=True)
    assert o.shape == (1, 6, 4, 264) and o.dtype == np.float16
    np.testing.assert_allclose(o, expected, atol=4e-3)
    np.testing.assert_allclose(lse, logs, rtol=1e-5, atol=1e-5)


def test_packed_sequences():
    q, k, _, _ = support.random_inputs(1, 30, 41, 4, 1, 576, dtype=torch.float16, device="cpu")
    ends = torch.tensor([0, 12, 12, 30], dtype=torch.int32), torch.tensor([0, 20, 25, 41], dtype=torch.int32)
    kernel = flashgen.compile(576, causal=True, head_dim_v=512, dtype="float16", varlen=True, shared_kv=True)
    o, lse = kernel(q[0], k[0], None, *ends, return_lse=True)
    for (a, b), (c, d) in zip(*(pairwise(x) for x in ends), strict=True):
        part = q[:, a:b], k[:, c:d], k[:, c:d, :, :512]
        found = support.forward_failures(lambda *_: (o[None, a:b], lse[None, :, a:b]), *part, causal=True)  # noqa: B023
        assert not found


def test_lists_of_blocks():
    q, k, v, _ = support.random_inputs(1, 70, 70, 4, 1, 320, dtype=torch.bfloat16, device="cpu")
    ids = torch.arange(70).repeat(1, 1).int() // 21
    kernel = flashgen.compile(320, causal=True, mask_mod=masks.document)
    blocks = flashgen.block_mask(masks.document, (ids,), 1, 1, 70, 70, causal=True)
    listed = kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    assert torch.equal(listed, kernel(q, k, v, mask_aux=(ids,)))


def test_there_is_a_forward_alone():
    for kernel in (flashgen.compile(576, head_dim_v=512), flashgen.compile(64, shared_kv=True)):
        for arch in ("sm_80", "sm_90a"):
            assert list(flashgen.compile(512, arch=arch).plan) == ["attention_forward"]
        assert list(kernel.ir) == list(kernel.source) == ["attention_forward"]
        assert "candidates that fit" in kernel.explain()


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"head_dim": 576, "head_dim_v": 512}, "head_dim = 576 has no backward, which goes up to 256"),
        ({"head_dim": 64, "head_dim_v": 264}, "head_dim_v = 264 has no backward"),
        ({"head_dim": 64, "shared_kv": True}, "shared_kv has no backward"),
    ],
    ids=str,
)
def test_gradients_are_refused_before_anything_runs(options, mentions, monkeypatch):
    kernel = flashgen.compile(**options)
    head_dim, width = kernel.spec.head_dim, kernel.spec.head_dim_v
    q, k, v, do = support.random_inputs(1, 4, 5, 2, 1, head_dim, width, dtype=torch.bfloat16, device="cpu")
    values = () if kernel.spec.shared_kv else (v,)
    o, lse = kernel(q, k, *values, return_lse=True)
    monkeypatch.setattr(type(kernel), "forward_of", None)
    monkeypatch.setattr(type(kernel), "_bind", None)
    refused(kernel, q.requires_grad_(), k, *values, mentions=[mentions])
    refused(kernel.backward, q, k, v, o, lse, do, mentions=[mentions])
    sizes = {"batch": 1, "seqlen_q": 4, "seqlen_k": 5, "heads": 2}
    refused(kernel.workspace_bytes, **sizes, mentions=[mentions])
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(kernel(q, k, *values), o)


def test_shared_values_are_refused_where_they_are_not():
    q, k, v, _ = support.random_inputs(1, 4, 5, 2, 1, 64, 32, dtype=torch.bfloat16, device="cpu")
    shared, apart = (flashgen.compile(64, head_dim_v=32, shared_kv=flag) for flag in (True, False))
    refused(shared, q, k, v, mentions=["v is given", "k[..., :32]", "leave it out"])
    refused(shared, q, k[..., :32], mentions=["k has head_dim 32"])
    refused(shared, q, None, mentions=["k"])
    refused(apart, q, k, mentions=["v is missing", "shared_kv=True"])
    refused(flashgen.compile, 64, head_dim_v=72, shared_kv=True, mentions=["head_dim_v = 72 exceeds head_dim = 64"])
    refused(flashgen.compile, 64, shared_kv=1, mentions=["shared_kv = 1 must be True or False"])


@pytest.mark.parametrize(("head_dim", "head_dim_v", "name"), [(584, 64, "head_dim"), (64, 520, "head_dim_v")])
def test_wider_ones_are_refused(head_dim, head_dim_v, name):
    refused(flashgen.compile, head_dim, head_dim_v=head_dim_v, mentions=[f"{name} = {max(head_dim, head_dim_v)} must"])
