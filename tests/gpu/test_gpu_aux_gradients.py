"""Gradients of arrays on the GPU, on both families, against torch's autograd through dense attention in float64."""

import math

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = ((113, 203), (300, 170), (700, 1100))  # ragged, rows that see no key, many tiles
# Axes of a bias that have one element: every nest, and every way that it leaves out the batch and the heads.
ONES = ((), (0,), (1,), (0, 1), (0, 1, 2), (1, 2), (3,), (0, 1, 3))


def distance(seqlen_q, seqlen_k):
    return torch.arange(seqlen_q, device="cuda")[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k, device="cuda")


def dense(q, k, v, causal, change, dtype=torch.float64, hidden=None, kept=None):
    """Attention in a type, rounded to it after each step; `change` is of the scores, kept of P."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = change(torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5)
    hide = distance(q.shape[1], k.shape[1]) < 0 if causal else torch.zeros(s.shape[2:], dtype=torch.bool, device="cuda")
    s = s.masked_fill(hide if hidden is None else hide | hidden, -math.inf)
    p = torch.softmax(s, -1).masked_fill(s == -math.inf, 0.0).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p if kept is None else p * kept.to(dtype), v)


def check(attend, tensors, arrays, causal, change, hidden=None, farthest=1.0, kept=None):
    """The gradients of arrays within three times what dense attention in bfloat16 loses, and those of q, k, v too.

    change: of the scores, by arrays of their type. farthest: what an element of the scores is multiplied by.
    """
    *qkv, do = (x.detach().requires_grad_() for x in tensors)
    leaves = [x.detach().requires_grad_() for x in arrays]
    o = attend(*qkv, *leaves)
    found = torch.autograd.grad(o, leaves, do, retain_graph=True)
    results = []
    for dtype in (torch.float64, qkv[0].dtype):
        given = [x.to(dtype) for x in leaves]
        results.append(
            torch.autograd.grad(
                dense(*qkv, causal, lambda s, x=given: change(s, *x), dtype, hidden, kept), leaves, do.to(dtype)
            )
        )
    for place, (x, ref, low) in enumerate(zip(found, *results, strict=True)):
        assert x.shape == ref.shape and x.dtype == leaves[place].dtype and torch.isfinite(x).all()
        bound = 3 * (low.double() - ref.double()).abs().max() + 2.0**-8 * farthest * (1 + ref.double().abs().max())
        worst = (x.double() - ref.double()).abs().max()
        assert worst <= bound, f"array {place}: {worst} > {bound}"
    return found


def inputs(seqlen_q, seqlen_k, head_dim=64, dtype=torch.bfloat16, heads=(4, 2)):
    return support.random_inputs(2, seqlen_q, seqlen_k, *heads, head_dim, dtype=dtype, device="cuda")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("ones", ONES, ids=str)
def test_a_bias_of_any_shape(ones, arch):
    for causal in (True, False):
        kernel = flashgen.compile(64, causal, arch=arch, bias=True)
        for lengths in LENGTHS:
            shape = [1 if axis in ones else size for axis, size in enumerate((2, 4, *lengths))]
            bias = torch.randn(shape, device="cuda")
            check(
                lambda q, k, v, t, kernel=kernel: kernel(q, k, v, bias=t),
                inputs(*lengths),
                [bias],
                causal,
                lambda s, t: s + t,
            )


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_slopes_of_heads_and_of_batches(head_dim, arch):
    kernel = flashgen.compile(head_dim, arch=arch, alibi=True)
    for lengths in LENGTHS[:2]:
        away = distance(*lengths).abs()
        for shape in ((4,), (2, 4)):
            slopes = torch.rand(shape, device="cuda") * 0.1
            check(
                lambda q, k, v, t: kernel(q, k, v, alibi_slopes=t),
                inputs(*lengths, head_dim),
                [slopes],
                True,
                lambda s, t, away=away: s - t[..., None, None] * away.to(t.dtype),
                farthest=max(lengths),
            )


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias(bidirectional, arch):
    score = scores.relative_bias(32, 128, bidirectional)
    kernel = flashgen.compile(128, not bidirectional, arch=arch, score_mod=score)
    for lengths in LENGTHS:
        behind, count = -distance(*lengths), 16 if bidirectional else 32
        away = behind.abs() if bidirectional else (-behind).clamp(min=0)
        half = count // 2
        far = half + (torch.log(away / half) / math.log(128 / half) * half).long()
        bucket = torch.where(away < half, away, far.clamp(max=count - 1)) + (behind > 0) * (16 * bidirectional)
        check(
            lambda q, k, v, t: kernel(q, k, v, score_aux=(t,)),
            inputs(*lengths, 128),
            [torch.randn(32, 4, device="cuda")],
            not bidirectional,
            lambda s, t, bucket=bucket: s + t[bucket].permute(2, 0, 1),
        )


def places(score, b, h, q_idx, kv_idx, table, ids):
    """By what is loaded for the query, for the key, and for both: rows, columns and elements are added atomically."""
    both = table[(ids[b, q_idx] + ids[b, kv_idx]) % 5, h]
    return score * (1.0 + 0.1 * table[ids[b, q_idx], h]) + table[ids[b, kv_idx], h] + both * 0.5


@pytest.mark.parametrize("arch", ARCHES)
def test_an_index_that_is_loaded(arch):
    kernel = flashgen.compile(64, False, arch=arch, score_mod=places, mask_mod=masks.document)
    for seqlen_q, seqlen_k in LENGTHS[::2]:
        ids = torch.randint(0, 5, (2, max(seqlen_q, seqlen_k)), device="cuda", dtype=torch.int32).sort(1).values
        rows, cols = ids[:, :seqlen_q].long(), ids[:, :seqlen_k].long()

        def change(s, t, rows=rows, cols=cols):
            both = t[(rows[:, :, None] + cols[:, None]) % 5].permute(0, 3, 1, 2)
            by_row, by_col = t[rows].permute(0, 2, 1)[..., None], t[cols].permute(0, 2, 1)[:, :, None]
            return s * (1.0 + 0.1 * by_row) + by_col + both * 0.5

        hidden = (rows[:, :, None] != cols[:, None])[:, None]
        given = {"mask_aux": (ids,)}
        check(
            lambda q, k, v, t, ids=ids, given=given: kernel(q, k, v, score_aux=(t, ids), **given),
            inputs(seqlen_q, seqlen_k),
            [torch.randn(5, 4, device="cuda")],
            False,
            change,
            hidden,
            farthest=4.0,
        )


@pytest.mark.parametrize("arch", ARCHES)
def test_where_the_order_is_fixed_it_repeats_bit_for_bit(arch):
    """Also on the second call, whose results lie where those of the first had been."""
    kernel = flashgen.compile(64, arch=arch, deterministic=True, bias=True, alibi=True)
    q, k, v, do = inputs(700, 1100)
    first = None
    for _ in range(20):
        given = {
            "bias": torch.full((4, 700, 1100), 0.5, device="cuda"),
            "alibi_slopes": torch.full((4,), 0.1, device="cuda"),
        }
        o, lse = kernel.forward(q, k, v, **given)
        *_, found = kernel.backward(q, k, v, o, lse, do, **given, aux_grads=("bias", "alibi_slopes"))
        first = first or found
        assert all(torch.equal(found[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_of_sixteen_bits_and_rows_that_are_not_aligned(dtype):
    q, k, v, do = (torch.randn(2, 130, 2, 65, device="cuda").bfloat16()[..., :64] for _ in range(4))
    bias = torch.randn(2, 130, 130, device="cuda").to(dtype)
    check(lambda q, k, v, t: flashgen.attention(q, k, v, True, bias=t), (q, k, v, do), [bias], True, lambda s, t: s + t)


@pytest.mark.parametrize("arch", ARCHES)
def test_tables_repeat_bit_for_bit_where_asked(arch):
    """An index by distance, whose tiles of one are added up first, and indices of a query, a key and both."""
    q, k, v, do = inputs(700, 1100)
    ids = torch.randint(0, 5, (2, 1100), device="cuda", dtype=torch.int32)
    of_distance, of_ids = torch.randn(32, 4, device="cuda"), torch.randn(5, 4, device="cuda")
    for score, given in ((scores.relative_bias(), (of_distance,)), (places, (of_ids, ids))):
        first = None
        for deterministic in [True] * 20 + [False]:
            kernel = flashgen.compile(64, False, arch=arch, deterministic=deterministic, score_mod=score)
            o, lse = kernel.forward(q, k, v, score_aux=given)
            asked = {"score_aux": given, "aux_grads": ("score_aux[0]",)}
            found = kernel.backward(q, k, v, o, lse, do, **asked)[3]["score_aux[0]"]
            first = found if first is None else first
            assert torch.equal(found, first) or not deterministic
        assert first.any() and torch.isfinite(first).all()
        torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-5 * float(first.abs().max()))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_beside_dropout(arch, deterministic):
    options = {"score_mod": relative, "bias": True, "dropout": True, "deterministic": deterministic}
    kernel = flashgen.compile(64, arch=arch, **options)
    drop = {"dropout_p": 0.25, "dropout_seed": 2**40 + 3}
    for lengths in LENGTHS[:2]:
        away = distance(*lengths).abs().clamp(max=8)
        kept = torch.from_numpy(flashgen.dropout_mask(2**40 + 3, 0, 0.25, 2, 4, *lengths)).cuda() / 0.75
        check(
            lambda q, k, v, t, bias: kernel(q, k, v, score_aux=(t,), bias=bias, **drop),
            inputs(*lengths),
            [torch.randn(4, 9, device="cuda"), torch.randn(lengths, device="cuda")],
            True,
            lambda s, t, bias, away=away: s + t[:, away] + bias,
            kept=kept,
        )


def relative(score, b, h, q_idx, kv_idx, table):
    """By the distance to the last key that is seen; the farthest share one element."""
    return score + table[h, abs(q_idx + (flashgen.seqlen_k - flashgen.seqlen_q) - kv_idx)]


def of_sequences(score, b, h, q_idx, kv_idx, table, of_each):
    return relative(score, b, h, q_idx, kv_idx, table) + of_each[b] * flashgen.sin(kv_idx * 0.5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_packed_sequences(arch, deterministic):
    """One table for all of them, in which each counts from its own beginning, and a number for each."""
    queries, keys = (130, 0, 700, 1, 64), (200, 30, 513, 0, 64)
    q, do = (torch.randn(sum(queries), 4, 64, device="cuda").bfloat16() for _ in range(2))
    k, v = (torch.randn(sum(keys), 2, 64, device="cuda").bfloat16() for _ in range(2))
    ends = [[sum(sizes[:place]) for place in range(6)] for sizes in (queries, keys)]
    told = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in ends]
    every = [torch.randn(shape, device="cuda").requires_grad_() for shape in ((4, 9), (5,))]
    kernel = flashgen.compile(
        64, arch=arch, varlen=True, score_mod=of_sequences, deterministic=deterministic, dtype="bfloat16"
    )
    first = None
    for _ in range(3):
        found = torch.autograd.grad(kernel(q, k, v, *told, score_aux=tuple(every)), every, do)
        first = first or found
        assert not deterministic or all(torch.equal(x, y) for x, y in zip(found, first, strict=True))
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        totals = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in every]
        for b, (rows, cols) in enumerate(zip(queries, keys, strict=True)):
            own_q, own_do = (x[None, ends[0][b] : ends[0][b] + rows] for x in (q, do))
            own_k, own_v = (x[None, ends[1][b] : ends[1][b] + cols] for x in (k, v))
            away = distance(rows, cols).abs().clamp(max=8)
            wave = torch.sin(torch.arange(cols, device="cuda") * 0.5)

            def change(s, away=away, wave=wave, b=b, dtype=dtype):
                table, of_each = (x.to(dtype) for x in every)
                return s + table[:, away] + of_each[b] * wave.to(dtype)

            o = dense(own_q, own_k, own_v, True, change, dtype)
            for total, x in zip(totals, torch.autograd.grad(o, every, own_do.to(dtype)), strict=True):
                total += x.double()
        results.append(totals)
    for x, ref, low in zip(found, *results, strict=True):
        bound = 3 * (low - ref).abs().max() + 2.0**-8 * 4 * (1 + ref.abs().max())
        assert (x.double() - ref).abs().max() <= bound
