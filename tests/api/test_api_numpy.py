"""NumPy in, NumPy out, through the interpreter: no torch, no GPU."""

import math

import numpy as np
import pytest

import flashgen
from flashgen.interp import reference

LENGTHS = [(1, 1), (5, 9), (9, 5), (64, 128), (113, 203), (203, 113), (130, 1)]
HEADS = [(2, 2), (4, 2), (3, 1)]


def inputs(seqlen_q, seqlen_k, heads_q=2, heads_kv=2, head_dim=16, head_dim_v=None, batch=2):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, seqlen_q, heads_q, head_dim))
    k = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim))
    v = rng.standard_normal((batch, seqlen_k, heads_kv, head_dim_v or head_dim))
    return [x.astype(np.float16) for x in (q, k, v)]


def check(result, q, k, v, *, causal, scale=None):
    """o within the rounding of P and of o itself to fp16; the LSE within fp32; -inf and 0 where no key is seen."""
    o, lse = result
    o_want, lse_want = reference.forward(q, k, v, causal=causal, scale=scale)
    assert isinstance(o, np.ndarray) and o.dtype == np.float16 and o.shape == o_want.shape
    assert isinstance(lse, np.ndarray) and lse.dtype == np.float32 and lse.shape == lse_want.shape
    assert np.array_equal(lse == -np.inf, lse_want == -np.inf)
    seen = np.isfinite(lse_want)
    np.testing.assert_allclose(lse[seen], lse_want[seen], rtol=1e-5, atol=5e-5)
    assert not o.swapaxes(1, 2)[~seen].any()
    if v.size:
        np.testing.assert_allclose(o, o_want, rtol=0, atol=4 * 2.0**-11 * float(np.abs(v).max()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_forward(lengths, heads, causal):
    q, k, v = inputs(*lengths, *heads)
    kernel = flashgen.compile(16, causal, dtype="float16")
    check(kernel(q, k, v, return_lse=True), q, k, v, causal=causal)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(16, 64), (64, 16), (40, 24), (192, 128), (256, 256), (72, 72)])
def test_head_dims(head_dim, head_dim_v):
    q, k, v = inputs(40, 50, head_dim=head_dim, head_dim_v=head_dim_v)
    kernel = flashgen.compile(head_dim, True, head_dim_v=head_dim_v, dtype="float16")
    check(kernel(q, k, v, return_lse=True), q, k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_lengths_of_zero(batch, seqlen_q, seqlen_k, causal):
    q, k, v = inputs(seqlen_q, seqlen_k, 4, 2, batch=batch)
    kernel = flashgen.compile(16, causal, dtype="float16")
    check(kernel(q, k, v, return_lse=True), q, k, v, causal=causal)


@pytest.mark.parametrize("scale", [None, 0.01, 1.0])
def test_scale(scale):
    q, k, v = inputs(20, 30)
    kernel = flashgen.compile(16, True, dtype="float16")
    check(kernel(q, k, v, scale=scale, return_lse=True), q, k, v, causal=True, scale=scale)


def test_scale_defaults_to_one_over_the_root_of_the_true_head_dim():
    """40 is padded inside the kernel; the scale must not be that of 48 or 64."""
    q, k, v = inputs(20, 30, head_dim=40)
    kernel = flashgen.compile(40, False, dtype="float16")
    _, lse = kernel(q, k, v, return_lse=True)
    _, want = kernel(q, k, v, scale=1 / math.sqrt(40), return_lse=True)
    np.testing.assert_array_equal(lse, want)


def test_causal_is_the_default_of_compile_and_not_of_attention():
    q, k, v = inputs(20, 20, head_dim=128)
    check(flashgen.compile(dtype="float16")(q, k, v, return_lse=True), q, k, v, causal=True)
    check(flashgen.attention(q, k, v, return_lse=True), q, k, v, causal=False)


def test_without_the_lse_only_o_is_returned():
    q, k, v = inputs(20, 30)
    kernel = flashgen.compile(16, True, dtype="float16")
    o, _ = kernel(q, k, v, return_lse=True)
    np.testing.assert_array_equal(kernel(q, k, v), o)


def test_inputs_are_left_alone_and_may_be_read_only():
    q, k, v = inputs(20, 30)
    copies = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    flashgen.compile(16, True, dtype="float16")(q, k, v)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v), copies, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_bhsd(causal):
    q, k, v = inputs(20, 30, 4, 2)
    turned = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    kernel = flashgen.compile(16, causal, dtype="float16", layout="bhsd")
    o, lse = kernel(*turned, return_lse=True)
    assert o.shape == (2, 4, 20, 16)
    check((o.swapaxes(1, 2), lse), q, k, v, causal=causal)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_one_liner(causal, layout):
    q, k, v = inputs(20, 30, 4, 2, head_dim_v=24)
    given = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    o, lse = flashgen.attention(*given, causal=causal, scale=0.2, layout=layout, return_lse=True)
    o = o.swapaxes(1, 2) if layout == "bhsd" else o
    check((o, lse), q, k, v, causal=causal, scale=0.2)


def test_any_strides_with_a_contiguous_last_dimension():
    rng = np.random.default_rng(1)
    kernel = flashgen.compile(16, True, dtype="float16")
    packed = rng.standard_normal((2, 30, 3, 4, 16)).astype(np.float16)
    padded = rng.standard_normal((3, 2, 60, 4, 17)).astype(np.float16)
    shared = rng.standard_normal((3, 1, 30, 1, 16)).astype(np.float16)
    for q, k, v in (
        [packed[:, :, i] for i in range(3)],
        [padded[i, :, ::2, :, :16] for i in range(3)],
        [padded[i, ::-1, ::-2, :, 1:] for i in range(3)],
        [np.broadcast_to(shared[i], (2, 30, 4, 16)) for i in range(3)],
    ):
        check(kernel(q, k, v, return_lse=True), q, k, v, causal=True)


def test_scores_of_ten_thousand():
    q, k, v = inputs(40, 30)
    q[:], k[:] = 2.0, 40.0
    kernel = flashgen.compile(16, False, dtype="float16")
    for sign in (1, -1):
        o, lse = kernel(q * np.float16(sign), k, v, scale=8.0, return_lse=True)
        check((o, lse), q * np.float16(sign), k, v, causal=False, scale=8.0)
        assert np.all(np.abs(lse) > 1e4)
