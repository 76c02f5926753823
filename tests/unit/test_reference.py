"""The oracle itself: the NumPy reference against torch's float64 autograd, and against what is known without one."""

import math

import numpy as np
import pytest
from functions import MASKS, SCORES

from flashgen import trace
from flashgen.interp import reference

SHAPES = [(1, 1), (5, 5), (3, 9), (9, 3), (1, 7), (7, 1), (17, 13)]
HEADS = [(2, 2), (4, 2), (3, 1)]


def inputs(seqlen_q, seqlen_k, heads_q=2, heads_kv=2, head_dim=8, head_dim_v=8, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, seqlen_q, heads_q, head_dim))
    k = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim))
    v = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim_v))
    do = rng.standard_normal((batch, seqlen_q, heads_q, head_dim_v))
    dlse = rng.standard_normal((batch, heads_q, seqlen_q))
    return q, k, v, do, dlse


def autograd(q, k, v, do, dlse, causal, scale):
    """The same by torch: softmax of a masked matrix, differentiated automatically; rows without keys are cut out."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    kh, vh = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = torch.einsum("bqhd,bhkd->bhqk", q, kh) * scale
    seqlen_q, seqlen_k = s.shape[-2:]
    blind = max(0, seqlen_q - seqlen_k) if causal else 0
    if causal:
        s = s + torch.full((seqlen_q, seqlen_k), -math.inf).double().triu(seqlen_k - seqlen_q + 1)
    seen = s[:, :, blind:]
    o, lse = (seen.softmax(-1) @ vh).transpose(1, 2), seen.logsumexp(-1)
    loss = (o * torch.tensor(do)[:, blind:]).sum()
    if dlse is not None:
        loss = loss + (lse * torch.tensor(dlse)[:, :, blind:]).sum()
    gradients = torch.autograd.grad(loss, (q, k, v))
    return blind, o.detach().numpy(), lse.detach().numpy(), [x.numpy() for x in gradients]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", SHAPES)
def test_agrees_with_autograd(lengths, heads, causal, with_dlse):
    q, k, v, do, dlse = inputs(*lengths, *heads, head_dim=8, head_dim_v=5)
    dlse = dlse if with_dlse else None
    blind, o_want, lse_want, gradients_want = autograd(q, k, v, do, dlse, causal, scale=None)
    o, lse = reference.forward(q, k, v, causal=causal)
    gradients = reference.backward(q, k, v, do, dlse, causal=causal)
    np.testing.assert_allclose(o[:, blind:], o_want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse[:, :, blind:], lse_want, rtol=1e-12, atol=1e-12)
    for x, want in zip(gradients, gradients_want, strict=True):
        assert x.shape == want.shape
        np.testing.assert_allclose(x, want, rtol=1e-11, atol=1e-12)


def test_scale_is_used_in_both_directions():
    q, k, v, do, dlse = inputs(6, 9)
    _, o_want, lse_want, gradients_want = autograd(q, k, v, do, dlse, causal=True, scale=0.7)
    o, lse = reference.forward(q, k, v, causal=True, scale=0.7)
    np.testing.assert_allclose(o, o_want, atol=1e-12)
    np.testing.assert_allclose(lse, lse_want, atol=1e-12)
    for x, want in zip(reference.backward(q, k, v, do, dlse, causal=True, scale=0.7), gradients_want, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-12)


def test_masked_rows_are_zero_and_ignored():
    q, k, v, do, dlse = inputs(7, 4)
    o, lse = reference.forward(q, k, v, causal=True)
    assert np.all(o[:, :3] == 0) and np.all(lse[:, :, :3] == -np.inf)
    assert np.all(np.isfinite(lse[:, :, 3:]))
    want = reference.backward(q, k, v, do, dlse, causal=True)
    assert np.all(want[0][:, :3] == 0)
    do[:, :3], dlse[:, :, :3] = np.nan, np.inf  # whatever arrives there, nothing may follow from it
    for x, y in zip(reference.backward(q, k, v, do, dlse, causal=True), want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_empty_lengths(batch, seqlen_q, seqlen_k, causal):
    q, k, v, do, dlse = inputs(seqlen_q, seqlen_k, batch=batch, head_dim_v=5)
    o, lse = reference.forward(q, k, v, causal=causal)
    assert o.shape == do.shape and lse.shape == dlse.shape
    assert np.all(o == 0) and np.all(lse == -np.inf)
    gradients = reference.backward(q, k, v, do, dlse, causal=causal)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert all(np.all(x == 0) for x in gradients)


def test_causal_is_bottom_right():
    """With one query more than the last, the last query sees all keys and the one before all but the last."""
    q, k, v, *_ = inputs(2, 5)
    o, _ = reference.forward(q, k, v, causal=True)
    full, _ = reference.forward(q, k, v)
    short, _ = reference.forward(q[:, :1], k[:, :4], v[:, :4])
    np.testing.assert_allclose(o[:, 1], full[:, 1], atol=1e-14)
    np.testing.assert_allclose(o[:, 0], short[:, 0], atol=1e-14)


def test_neighbouring_query_heads_share_a_key_head():
    q, k, v, *_ = inputs(3, 4, heads_q=4, heads_kv=2)
    o, _ = reference.forward(q, k, v)
    for head in range(4):
        alone, _ = reference.forward(q[:, :, [head]], k[:, :, [head // 2]], v[:, :, [head // 2]])
        np.testing.assert_allclose(o[:, :, [head]], alone, atol=1e-14)


def test_large_scores_do_not_overflow():
    q, k, v, do, dlse = inputs(4, 6)
    o, lse = reference.forward(q * 300, k * 300, v)
    assert np.all(np.isfinite(o)) and np.all(np.isfinite(lse)) and np.abs(lse).max() > 1e4
    assert all(np.all(np.isfinite(x)) for x in reference.backward(q * 300, k * 300, v, do, dlse))


def test_float16_inputs_are_computed_in_float64():
    arrays = [x.astype(np.float16) for x in inputs(5, 5)]
    o, lse = reference.forward(*arrays[:3], causal=True)
    want, _ = reference.forward(*(x.astype(np.float64) for x in arrays[:3]), causal=True)
    assert o.dtype == lse.dtype == np.float64
    np.testing.assert_array_equal(o, want)
    assert all(x.dtype == np.float64 for x in reference.backward(*arrays, causal=True))


@pytest.mark.parametrize("score", [None, *(name for name in SCORES if name != "infinite")])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_mask_and_score_functions_agree_with_autograd(mask, score):
    """tests/support.py evaluates them in torch, and has autograd find the derivative."""
    torch = pytest.importorskip("torch")
    import support

    functions = {"mask": mask and trace.mask(MASKS[mask]), "score": score and trace.score(SCORES[score])}
    q, k, v, do, dlse = inputs(11, 14, 4, 2)
    found = (
        *reference.forward(q, k, v, causal=True, **functions),
        *reference.backward(q, k, v, do, dlse, causal=True, **functions),
    )
    tensors = [torch.tensor(x) for x in (q, k, v, do)]
    expected = support.dense(*tensors, causal=True, dlse=torch.tensor(dlse), **functions)
    for x, ref in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, ref.numpy(), rtol=1e-9, atol=1e-12)
