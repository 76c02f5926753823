"""Lengths of nothing and of a few, scores of +-10000, a very long sequence, and arrays of more than 2^31 elements."""

import math

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import Spec, attend, inputs, report  # noqa: E402

GIB = 1 << 30
EMPTY = [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (0, 0, 0), (2, 300, 0)]


@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(40, dtype="float16", head_dim_v=24)], ids=str)
def test_lengths_of_zero(kernel, spec):
    """Without keys O = 0, LSE = -inf and the gradients are 0, shaped as ever; without queries dK = dV = 0."""
    found = []
    for batch, seqlen_q, seqlen_k in EMPTY:
        arrays = inputs(spec, batch, seqlen_q, seqlen_k, 4, 2)
        sentences = support.failures(attend(kernel), *arrays, causal=spec.causal)
        found += [f"batch {batch} ({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(40, causal=True, dtype="float16")], ids=str)
def test_every_pair_of_tiny_lengths(kernel, spec):
    found = []
    for seqlen_q in range(1, 21):
        for seqlen_k in range(1, 21):
            arrays = inputs(spec, 3, seqlen_q, seqlen_k, 4, 2, seed=seqlen_q)
            sentences = support.failures(attend(kernel), *arrays, causal=True)
            found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


@pytest.mark.parametrize("spec", [Spec(d, causal=True) for d in (16, 64, 128, 256)], ids=str)
def test_masked_rows(kernel, spec):
    """More queries than keys: the first rows see nothing. Whole tiles of them, and a tile that is masked in part."""
    found = []
    for seqlen_q, seqlen_k in ((700, 30), (129, 1), (300, 255), (65, 64)):
        arrays = inputs(spec, 1, seqlen_q, seqlen_k, 2, 2)
        blind = seqlen_q - seqlen_k
        result = support.evaluate(attend(kernel), *arrays)
        assert not result.o[:, :blind].any() and not result.dq[:, :blind].any()
        assert bool((result.lse[..., :blind] == -math.inf).all())
        found += [f"({seqlen_q}, {seqlen_k}) {s}" for s in support.judge(result, *arrays, causal=True)]
    report(found)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128, dtype="float16")], ids=str)
def test_all_scores_are_ten_thousand(kernel, spec, sign):
    """Exact in every precision: 2 * 40 * 128 = 10240. So the rule applies although exp of such a score overflows."""
    q, k, v, do = inputs(spec, 2, 113, 203, 4, 2)
    q.fill_(2.0 * sign), k.fill_(40.0)
    scale = 128.0 / spec.head_dim
    result = support.evaluate(attend(kernel, scale=scale), q, k, v, do)
    assert bool((result.lse.abs() > 1e4).all())
    report(support.judge(result, q, k, v, do, causal=spec.causal, scale=scale))


@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128, dtype="float16")], ids=str)
def test_random_scores_of_ten_thousand(kernel, spec):
    """Scores of +-10000 are only known to 1e-3 in fp32: so coarse bounds, but nothing infinite anywhere."""
    q, k, v, do = inputs(spec, 2, 300, 203, 4, 2)
    q, k = q * 100, k * 100
    result = support.evaluate(attend(kernel), q, k, v, do)
    ref = support.dense(q, k, v, do, causal=spec.causal)
    seen = ref.lse > -math.inf
    assert float(ref.lse[seen].abs().max()) > 1e4
    assert all(bool(torch.isfinite(x).all()) for x in (result.o, result.dq, result.dk, result.dv))
    assert torch.equal(result.lse > -math.inf, seen)
    assert float((result.lse.double() - ref.lse)[seen].abs().max()) < 0.1
    assert float((result.o.double() - ref.o).abs().max()) < 0.1


@pytest.mark.parametrize("spec", [Spec(64)], ids=str)
def test_one_huge_score_among_small_ones(kernel, spec):
    """The maximum arrives in the last tile, so that everything summed before is rescaled to nothing."""
    q, k, v, do = inputs(spec, 1, 130, 1000, 2, 2)
    q[..., 0], k[..., 0] = 16.0, 0.0
    k[:, 995, :, 0] = 256.0
    report(support.failures(attend(kernel), q, k, v, do))


def need(gib):
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, {free:.0f} are there")


def big(*shape, dtype):
    return torch.empty(shape, device="cuda", dtype=dtype).normal_()


def judge_batches(result, q, k, v, do, batches, causal):
    found = []
    for b in batches:
        part = support.Result(*(x[b : b + 1] for x in result))
        sentences = support.judge(part, *(x[b : b + 1] for x in (q, k, v, do)), causal=causal)
        found += [f"batch {b}: {sentence}" for sentence in sentences]
    return found


def part(result, heads, rows):
    """Some heads and rows, of queries and of keys alike."""
    o, lse, *gradients = result
    return support.Result(o[:, rows, heads], lse[:, heads, rows], *(x[:, rows, heads] for x in gradients))


@pytest.mark.parametrize("spec", [Spec(128, causal=True)], ids=str)
def test_a_sequence_of_131072(kernel, spec):
    """Each stretch of 8192 rows by itself, in the first and the last head: errors grow and shrink along the sequence.

    Powers of two on v and do change no rounding. Without them the small results far down the sequence, where a
    probability is about 1e-5, would be lost in what the rule allows for one rounding near 0.3.
    """
    seqlen, heads, stretch = 131072, 16, 8192
    need(40)
    q, k, v, do = inputs(spec, 1, seqlen, seqlen, heads, heads)
    v *= 2**16
    do *= 2**16
    result = support.evaluate(attend(kernel), q, k, v, do)
    found, every = [], slice(None)
    for head in (0, heads - 1):
        one = slice(head, head + 1)
        got, arrays = part(result, one, every), [x[:, :, one] for x in (q, k, v, do)]
        ref, low = (support.dense_in_chunks(*arrays, dtype=dtype) for dtype in (torch.float64, q.dtype))
        for start in range(0, seqlen, stretch):
            parts = [part(x, every, slice(start, start + stretch)) for x in (got, ref, low)]
            sentences = support.violations(*parts, q.dtype)
            found += [f"head {head}, rows from {start}: {sentence}" for sentence in sentences]
    del q, k, v, do, arrays, result, got, ref, low, parts
    torch.cuda.empty_cache()
    report(found)


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_more_than_2_to_the_31_elements_by_batch(kernel, spec):
    """Also a batch that the third dimension of a grid, which ends at 65 535, cannot count."""
    batch, seqlen, heads = 66000, 128, 4
    need(70)
    shape = (batch, seqlen, heads, spec.head_dim)
    assert math.prod(shape) > 1 << 31
    arrays = [big(*shape, dtype=torch.bfloat16) for _ in range(4)]
    result = support.evaluate(attend(kernel), *arrays)
    found = judge_batches(result, *arrays, [0, batch // 2, 65534, 65535, batch - 1], causal=True)
    del arrays, result
    torch.cuda.empty_cache()
    report(found)


@pytest.mark.parametrize("spec", [Spec(128)], ids=str)
def test_more_than_2_to_the_31_elements_by_length(kernel, spec):
    """A long sequence of queries over few keys; checked in its last rows, where dQ and O lie beyond 2^31."""
    seqlen_q, heads = 262144 + 200, 64
    need(50)
    q, do = (big(1, seqlen_q, heads, 128, dtype=torch.bfloat16) for _ in range(2))
    k, v = (big(1, 70, heads, 128, dtype=torch.bfloat16) for _ in range(2))
    assert q.numel() > 1 << 31
    result = support.evaluate(attend(kernel), q, k, v, do)
    found = []
    for rows in (slice(0, 150), slice(-150, None)):
        ref, low = (support.dense(q[:, rows], k, v, do[:, rows], dtype=t) for t in (torch.float64, q.dtype))
        for name, factor in (("o", 2.0), ("dq", 3.0)):
            x = getattr(result, name)[:, rows]
            found.append(support.violation(name, x, getattr(ref, name), getattr(low, name), factor, q.dtype))
        found.append(support.lse_violation(result.lse[..., rows], ref.lse))
    del q, do, result
    torch.cuda.empty_cache()
    report([sentence for sentence in found if sentence])


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_huge_stride_of_a_row(kernel, spec):
    """256 rows, 2^24 + 8 elements apart: the second half lies beyond 2^31 in each of q, k, v and do."""
    need(12)
    rows, heads, stride = 256, 2, (1 << 24) + 8
    buffer = torch.empty(rows * stride, device="cuda", dtype=torch.bfloat16)
    width = heads * spec.head_dim
    views = [
        buffer[i * width :].as_strided((1, rows, heads, spec.head_dim), (0, stride, spec.head_dim, 1)) for i in range(4)
    ]
    for x in views:
        x.normal_()
    found = support.failures(attend(kernel), *views, causal=True)
    del buffer, views
    torch.cuda.empty_cache()
    report(found)
