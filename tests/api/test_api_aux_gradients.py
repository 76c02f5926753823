"""Gradients of arrays, `bias` and `alibi_slopes`: as torch's autograd gives them for dense attention in float64."""

import math

import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import scores

torch = pytest.importorskip("torch")
SHAPES = [(2, 4, 21, 30), (1, 4, 21, 30), (2, 1, 21, 30), (1, 1, 21, 30), (21, 30), (30,), (4, 1, 30), (2, 4, 21, 1)]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture
def inputs():
    return support.random_inputs(2, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")


def distance(seqlen_q=21, seqlen_k=30):
    return torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)


def dense(q, k, v, causal, change):
    """Attention in float64; `change` is applied to the scores."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = change(torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5)
    if causal:
        s = s.masked_fill(distance() < 0, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v)


def agrees(found, expected, dtype=torch.float16, farthest=1):
    """Within some roundings of the storage type of q, of the largest value.

    farthest: what the rounding of o, which moves delta of a row, is multiplied by: the largest distance for slopes.
    """
    unit = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    for x, ref in zip(found, expected, strict=True):
        assert x.shape == ref.shape
        assert (x.double() - ref).abs().max() <= 4 * unit * (farthest + ref.abs().max())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_of_any_shape_with_alibi(inputs, shape, causal):
    """The bias has the shape that it was given in, also of fewer axes; slopes are those of heads, or of batches too."""
    q, k, v, do = (x.detach().requires_grad_() for x in inputs)
    bias = torch.randn(shape).requires_grad_()
    for slopes in (torch.rand(4).requires_grad_(), torch.rand(2, 4).requires_grad_()):
        every = (q, k, v, bias, slopes)
        o = flashgen.attention(q, k, v, causal, bias=bias, alibi_slopes=slopes)
        by_head = slopes.double()[..., None, None]
        expected = dense(q, k, v, causal, lambda s, by_head=by_head: s + bias.double() - by_head * distance().abs())
        agrees([o], [expected])
        found = torch.autograd.grad(o, every, do)
        assert [x.dtype for x in found[3:]] == [torch.float32] * 2
        ref = torch.autograd.grad(expected, every, do.double())
        agrees(found[:3], ref[:3])
        agrees(found[3:], ref[3:], farthest=30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_and_strides(inputs, dtype):
    """An expanded bias has a gradient for each of its elements, of its type, which autograd then adds up."""
    q, k, v, do = inputs
    bias = torch.randn(30, 1, 1, 21).to(dtype).requires_grad_()
    view = bias.permute(1, 2, 3, 0).expand(2, 4, 21, 30)
    o = flashgen.attention(q, k, v, score_mod=scores.bias, score_aux=(view,))
    (found,) = torch.autograd.grad(o, bias, do)
    expected = dense(q, k, v, False, lambda s: s + view.double())
    (ref,) = torch.autograd.grad(expected, bias, do.double())
    assert found.dtype == dtype and found.shape == bias.shape
    agrees([found], [ref], torch.bfloat16)


def test_some_of_the_gradients(inputs):
    q, k, v, do = inputs
    bias, slopes = torch.randn(4, 21, 30).requires_grad_(), torch.rand(4).requires_grad_()
    q = q.detach().requires_grad_()
    o, lse = flashgen.attention(q, k, v, bias=bias, alibi_slopes=slopes, return_lse=True)
    dlse = torch.randn_like(lse)
    every = torch.autograd.grad((o, lse), (q, bias, slopes), (do, dlse), retain_graph=True)
    for place, one in enumerate((q, bias, slopes)):
        (alone,) = torch.autograd.grad((o, lse), one, (do, dlse), retain_graph=True)
        assert torch.equal(alone, every[place])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_as_t5_has_it(inputs, bidirectional):
    q, k, v, do = inputs
    table = torch.randn(32, 4).requires_grad_()
    o = flashgen.attention(q, k, v, score_mod=scores.relative_bias(32, 20, bidirectional), score_aux=(table,))
    behind, count = -distance(), 16 if bidirectional else 32
    away = behind.abs() if bidirectional else (-behind).clamp(min=0)
    far = count // 2 + (torch.log(away / (count // 2)) / math.log(20 / (count // 2)) * (count // 2)).long()
    bucket = torch.where(away < count // 2, away, far.clamp(max=count - 1)) + (behind > 0) * (16 * bidirectional)
    expected = dense(q, k, v, False, lambda s: s + table.double()[bucket].permute(2, 0, 1))
    agrees([o], [expected])
    agrees(torch.autograd.grad(o, table, do), torch.autograd.grad(expected, table, do.double()))


def test_relative_bias_refuses_what_has_no_buckets():
    refused(scores.relative_bias, 3, mentions=["buckets = 3", "4 buckets"])
    refused(scores.relative_bias, 32, 8, mentions=["max_distance = 8", "over 8"])


def test_gradients_without_autograd(inputs):
    """NumPy: in the order that was asked for, and by the same words; without a word the result is what it was."""
    q, k, v, do = (x.numpy() for x in inputs)
    bias, table = np.ones((1, 1, 21, 30), np.float32), np.ones((2, 4), np.float32)
    kernel = flashgen.compile(
        16,
        dtype="float16",
        bias=True,
        score_mod=lambda s, b, h, q_idx, kv_idx, t: s * t[0, h] + t[1, h] * (kv_idx * 0.1),
    )
    given = {"bias": bias, "score_aux": (table,)}
    o, lse = kernel.forward(q, k, v, **given)
    plain = kernel.backward(q, k, v, o, lse, do, **given)
    *own, found = kernel.backward(q, k, v, o, lse, do, **given, aux_grads=("score_aux[0]", "bias"))
    assert len(plain) == 3 and all(np.array_equal(x, y) for x, y in zip(plain, own, strict=True))
    assert list(found) == ["score_aux[0]", "bias"]
    leaf = torch.ones(2, 4).requires_grad_()

    def change(s):
        return s * leaf[0, :, None, None].double() + leaf[1, :, None, None].double() * torch.arange(30) * 0.1 + 1.0

    (ref,) = torch.autograd.grad(dense(*inputs[:3], True, change), leaf, inputs[3].double())
    agrees([torch.from_numpy(found["score_aux[0]"])], [ref], farthest=4)
    assert found["bias"].shape == bias.shape and found["bias"].any()


def by_distance(score, b, h, q_idx, kv_idx, table):
    """The farthest share the last element."""
    return score + table[h, abs(q_idx - kv_idx)]


def far(table, seqlen_q=21, seqlen_k=30):
    """What by_distance adds: (heads, seqlen_q, seqlen_k)."""
    away = (torch.arange(seqlen_q)[:, None] - torch.arange(seqlen_k)).abs()
    return table.double()[:, away.clamp(max=table.shape[1] - 1)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_arrays_beside_each_other(inputs, deterministic):
    """A table, whose gradient is a sum of integers where it has to repeat; the bias, and sinks, beside it."""
    q, k, v, do = inputs
    table, bias, sinks = torch.randn(4, 9).requires_grad_(), torch.randn(21, 30).requires_grad_(), torch.zeros(4)
    options = {"score_mod": by_distance, "bias": True, "sinks": True, "deterministic": deterministic}
    kernel = flashgen.compile(16, dtype="float16", **options)
    given = {"score_aux": (table,), "bias": bias, "sinks": sinks}
    found = torch.autograd.grad(kernel(q, k, v, **given), (table, bias), do)
    extra = torch.zeros(2, 1, 4, 16).half()  # a key of zeros, of which the score is that of a sink of 0

    def change(s):
        return torch.cat([s[..., :30] + far(table) + bias.double(), s[..., 30:]], -1)

    with_sink = [torch.cat([x.repeat_interleave(2, 2), extra], 1) for x in (k, v)]
    hidden = torch.cat([distance() < 0, torch.zeros(21, 1, dtype=torch.bool)], 1)
    expected = dense(q, *with_sink, False, lambda s: change(s).masked_fill(hidden, -math.inf))
    agrees(found, torch.autograd.grad(expected, (table, bias), do.double()))
    detached = {name: x.detach() for name, x in given.items() if name != "score_aux"} | {"score_aux": (table.detach(),)}
    o, lse = kernel.forward(q, k, v, **detached)
    *own, arrays = kernel.backward(q, k, v, o, lse, do, **detached, aux_grads=("bias", "score_aux[0]"))
    assert len(own) == 4 and list(arrays) == ["bias", "score_aux[0]"]
    assert torch.equal(arrays["score_aux[0]"], found[0]) and torch.equal(arrays["bias"], found[1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_beside_dropout(inputs, deterministic):
    """The gradients are those of the mask that the call draws; with p = 0 nothing is drawn."""
    q, k, v, do = inputs
    every = table, slopes = torch.randn(4, 9).requires_grad_(), torch.rand(4).requires_grad_()
    options = {"score_mod": by_distance, "alibi": True, "dropout": True, "deterministic": deterministic}
    kernel = flashgen.compile(16, False, dtype="float16", **options)
    for p in (0.25, 0.0):
        drop = {"dropout_p": p, "dropout_seed": 2**40 + 3}
        keep = torch.from_numpy(flashgen.dropout_mask(2**40 + 3, 0, p, 2, 4, 21, 30)) / (1.0 - p)
        o = kernel(q, k, v, score_aux=(table,), alibi_slopes=slopes, **drop)
        s = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / 4
        s = s + far(table) - slopes.double()[:, None, None] * distance().abs()
        dropped = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1) * keep, v.double().repeat_interleave(2, 2))
        agrees([o], [dropped])
        found, expected = (torch.autograd.grad(*pair) for pair in ((o, every, do), (dropped, every, do.double())))
        agrees(found, expected, farthest=30)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal, deterministic):
    """One table for all of them, in which each counts from its own beginning, and a number for each sequence."""
    queries, keys = (5, 0, 40, 1, 0), (7, 3, 33, 0, 4)

    def shifted(score, b, h, q_idx, kv_idx, table, of_each):
        return by_distance(score, b, h, q_idx, kv_idx, table) + of_each[b] * kv_idx * 0.1

    q, do = (torch.randn(46, 4, 16).half() for _ in range(2))
    k, v = (torch.randn(47, 2, 16).half() for _ in range(2))
    told = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
    every = table, of_each = torch.randn(4, 9).requires_grad_(), torch.randn(5).requires_grad_()
    options = {"varlen": True, "score_mod": shifted, "deterministic": deterministic}
    kernel = flashgen.compile(16, causal, dtype="float16", **options)
    found = torch.autograd.grad(kernel(q, k, v, *told, score_aux=every), every, do)
    expected = [torch.zeros(x.shape, dtype=torch.float64) for x in every]
    for b, (rows, cols) in enumerate(zip(queries, keys, strict=True)):
        begins = (told[0], told[1], told[1], told[0])
        own = [x[begin[b] : begin[b + 1]][None] for x, begin in zip((q, k, v, do), begins, strict=True)]
        s = torch.einsum("bqhd,bkhd->bhqk", own[0].double(), own[1].double().repeat_interleave(2, 2)) / 4
        s = s + far(table, rows, cols) + of_each.double()[b] * torch.arange(cols) * 0.1
        hidden = (distance(rows, cols) < 0) & torch.tensor(causal)
        p = torch.softmax(s.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
        o = torch.einsum("bhqk,bkhd->bqhd", p, own[2].double().repeat_interleave(2, 2))
        for total, x in zip(expected, torch.autograd.grad(o, every, own[3].double()), strict=True):
            total += x
    agrees(found, expected, farthest=12)  # rounding of the o of 40 rows of 4 heads goes to one number
    given = {"score_aux": tuple(x.detach() for x in every)}
    o, lse = kernel.forward(q, k, v, *told, **given)
    *own, arrays = kernel.backward(q, k, v, o, lse, do, None, *told, **given, aux_grads=("score_aux[1]",))
    assert len(own) == 3 and torch.equal(arrays["score_aux[1]"], found[1])


def test_beside_a_block_mask(inputs):
    """All blocks are looked at, with the same mask."""
    q, k, v, do = inputs
    bias = torch.randn(4, 21, 30).requires_grad_()
    kernel = flashgen.compile(16, True, dtype="float16", window=(6, 0), bias=True)
    blocks = flashgen.block_mask(None, None, 1, 1, 21, 30, causal=True, window=(6, 0), block_size=16, like=q)
    listed, plain = (
        torch.autograd.grad(kernel(q, k, v, bias=bias, block_mask=given), bias, do)[0] for given in (blocks, None)
    )
    assert plain.any()
    torch.testing.assert_close(listed, plain, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["bias", "alibi"])
def test_options_of_one_length_are_refused_for_packed_sequences(name):
    refused(flashgen.compile, 16, varlen=True, **{name: True}, mentions=[f"{name} = True with varlen", "score_mod"])


@pytest.mark.parametrize(
    ("options", "given", "mentions"),
    [
        ({"bias": True}, {}, ["bias is missing", "bias=True"]),
        ({}, {"bias": torch.ones(30)}, ["bias is given", "without bias=True"]),
        ({"alibi": True}, {}, ["alibi_slopes is missing", "alibi=True"]),
        ({}, {"alibi_slopes": torch.ones(4)}, ["alibi_slopes is given", "without alibi=True"]),
        ({"bias": True}, {"bias": torch.ones(3, 21, 30)}, ["bias has shape (1, 3, 21, 30)", "each whole or 1"]),
        ({"bias": True}, {"bias": torch.ones(1, 2, 4, 21, 30)}, ["bias has 5 dimensions"]),
        ({"bias": True}, {"bias": torch.ones(30).double()}, ["bias is float64"]),
        ({"bias": True}, {"bias": [1.0]}, ["bias is of type list"]),
        ({"alibi": True}, {"alibi_slopes": torch.ones(3)}, ["alibi_slopes has shape (1, 3)", "(batch, heads)"]),
        ({"alibi": True}, {"alibi_slopes": torch.ones(1)}, ["alibi_slopes has shape (1, 1)"]),
        ({"alibi": True}, {"alibi_slopes": torch.ones(4).half()}, ["alibi_slopes is float16", "float32"]),
    ],
)
def test_what_is_refused(inputs, options, given, mentions):
    q, k, v, _ = inputs
    refused(flashgen.compile(16, dtype="float16", **options), q, k, v, **given, mentions=mentions)


def test_wrong_arrays_are_refused_with_gradients_too(inputs):
    q, k, v, _ = (x.detach().requires_grad_() for x in inputs)
    slopes, kernel = torch.rand(4).requires_grad_(), flashgen.compile(16, dtype="float16", bias=True, alibi=True)
    given = {"bias": np.ones(30, np.float32), "alibi_slopes": slopes}
    refused(kernel, q, k, v, **given, mentions=["bias is not of torch as q is"])
    refused(kernel, q, k[:, :5], v, bias=torch.ones(30), alibi_slopes=slopes, mentions=["k and v disagree"])


def test_what_has_no_gradient_is_refused(inputs):
    q, k, v, do = inputs
    kernel = flashgen.compile(16, dtype="float16", bias=True)
    bias = torch.ones(30)
    o, lse = kernel.forward(q, k, v, bias=bias)
    for word in ("alibi_slopes", "score_aux[0]", "q"):
        given = {"bias": bias, "aux_grads": (word,)}
        refused(kernel.backward, q, k, v, o, lse, do, **given, mentions=[repr(word), "gradients of bias"])
    with pytest.raises(TypeError, match="bias = 1 must be True or False"):
        flashgen.compile(16, bias=1)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0)])
def test_nothing_to_add_up_is_zero(batch, seqlen_q, seqlen_k):
    q, do = (torch.randn(batch, seqlen_q, 4, 16).half() for _ in range(2))
    k = v = torch.randn(batch, seqlen_k, 2, 16).half()
    bias, slopes = torch.ones(4, seqlen_q, 1).requires_grad_(), torch.ones(4).requires_grad_()
    found = torch.autograd.grad(flashgen.attention(q, k, v, bias=bias, alibi_slopes=slopes), (bias, slopes), do)
    assert [x.shape for x in found] == [bias.shape, slopes.shape] and not any(x.any() for x in found)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(2, 7), (2, 40), (3, 2, 20, 40)])
def test_gradients_of_arrays_of_padded_batches(shape, deterministic):
    index = {7: lambda b, h, i, j: (h, (i + j) % 7), 40: lambda b, h, i, j: (h, j)}.get(shape[-1])
    if len(shape) == 4:
        index = lambda b, h, i, j: (b, h, i, j)  # noqa: E731

    def added(score, b, h, q_idx, kv_idx, t):
        return score + t[index(b, h, q_idx, kv_idx)]

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, 2, 16, generator=generator).bfloat16() for n in (20, 40, 40))
    dout, table = torch.randn(3, 20, 2, 16, generator=generator), torch.randn(*shape, generator=generator)
    used = torch.tensor([40, 7, 0], dtype=torch.int32)
    kernel = flashgen.compile(16, False, score_mod=added, target="interpret", deterministic=deterministic)
    table.requires_grad_()
    o = kernel(q, k, v, score_aux=(table,), seqused_k=used)
    (found,) = torch.autograd.grad((o.float() * dout).sum(), table)
    wide = table.detach().double().requires_grad_()
    b, h = torch.arange(3)[:, None, None, None], torch.arange(2)[:, None, None]
    i, j = torch.arange(20)[:, None], torch.arange(40)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4 + wide[index(b, h, i, j)]
    p = torch.softmax(scores.masked_fill(j >= used[:, None, None, None], -torch.inf), -1).nan_to_num(0)
    expected_o = torch.einsum("bhij,bjhd->bihd", p, v.double())
    (expected,) = torch.autograd.grad((expected_o * dout.double()).sum(), wide)
    assert (found.double() - expected).abs().max() < 0.01 * expected.abs().max()
