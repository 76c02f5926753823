"""Packed sequences on the GPU, forward and backward, on both families, against dense float64 attention of each."""

import math

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402
from functions import MASKS, SCORES  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
# Ragged, empty on either side and on both, one long sequence among short ones, more queries than keys.
QUERIES = (113, 0, 1, 700, 64, 0, 128, 5, 129)
KEYS = (203, 40, 300, 650, 64, 0, 0, 1, 77)


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def inputs(queries, keys, heads, dims, dtype="bfloat16", seed=0):
    """(q, k, v, do) of (total, heads, dim), and the two cu_seqlens."""
    sizes = (1, sum(queries), sum(keys), *heads, *dims)
    arrays = support.random_inputs(*sizes, dtype=getattr(torch, dtype), device="cuda", seed=seed)
    return [x[0] for x in arrays], (offsets(queries), offsets(keys))


def attend(kernel, told, **options):
    return lambda q, k, v: kernel(q, k, v, *told, return_lse=True, **options)


def fails(kernel, queries=QUERIES, keys=KEYS, heads=(4, 2), dims=(128, 128), used=None, foreign=(), **options):
    """Sentences on what the kernel gets wrong in any sequence. foreign: those of NaN, whose results are not seen."""
    arrays, told = inputs(queries, keys, heads, dims, kernel.spec.dtype.name)
    counts = {}
    if used is not None:
        counts["seqused_k"] = torch.tensor(used, dtype=torch.int32, device="cuda")
        for number, count in enumerate(used):
            for x in arrays[1:3]:
                x[int(told[1][number]) + count : int(told[1][number + 1])] = math.nan
    for number in foreign:
        for x, of in zip(arrays, (told[0], told[1], told[1], told[0]), strict=True):
            x[int(of[number]) : int(of[number + 1])] = math.nan
    result = support.evaluate(attend(kernel, told, **counts, **options), *arrays)
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    of_q, of_k = (x.tolist() for x in told)
    found = []
    for number in sorted(set(range(len(queries))) - set(foreign)):
        length = keys[number] if used is None else used[number]
        rows = slice(of_q[number], of_q[number + 1])
        cols = slice(of_k[number], of_k[number] + length)
        own = (result.o[rows], result.lse[:, rows], result.dq[rows], result.dk[cols], result.dv[cols])
        one = support.Result(*(x[None] for x in own))
        given = [x[part][None] for x, part in zip(arrays, (rows, cols, cols, rows), strict=True)]
        found += [f"sequence {number}: {sentence}" for sentence in support.judge(one, *given, **functions)]
        rest = slice(of_k[number] + length, of_k[number + 1])
        if not all((x[rest] == 0).all() for x in (result.dk, result.dv)):
            found.append(f"sequence {number}: gradients of keys that are not used")
    return found


def compiled(head_dim=128, causal=True, **options):
    return flashgen.compile(head_dim, causal, varlen=True, **options)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_is_attention_by_itself(causal, arch):
    report(fails(compiled(causal=causal, arch=arch)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (192, 128), (256, 256), (40, 24)])
def test_other_head_dims(head_dim, head_dim_v, arch):
    kernel = compiled(head_dim, arch=arch, head_dim_v=head_dim_v, dtype="float16")
    report(fails(kernel, dims=(head_dim, head_dim_v)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
def test_neighbours_of_nan(causal, arch):
    """Every tile that runs over the end of a sequence meets rows of NaN: they are not read, or count for nothing."""
    report(fails(compiled(causal=causal, arch=arch), foreign=(1, 3, 5, 7)))
    report(fails(compiled(causal=causal, arch=arch), foreign=(0, 2, 4, 6, 8)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_keys_that_are_not_used(arch, deterministic):
    used = (100, 40, 1, 0, 63, 0, 0, 1, 70)
    report(fails(compiled(arch=arch, deterministic=deterministic), used=used))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_deterministic_repeats(head_dim, arch):
    kernel = compiled(head_dim, arch=arch, deterministic=True)
    (q, k, v, do), told = inputs(QUERIES, KEYS, (4, 2), (head_dim, head_dim))
    first = support.evaluate(attend(kernel, told), q, k, v, do)
    for _ in range(5):
        again = support.evaluate(attend(kernel, told), q, k, v, do)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    report(fails(kernel, dims=(head_dim, head_dim)))


FUNCTIONS = {
    "window": {"window": (100, 0)},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"causal": True, "score_mod": scores.alibi},
    "top left": {"causal": "top-left", "mask_mod": masks.dilated(3)},
    "by head": {"mask_mod": MASKS["by head"], "score_mod": SCORES["wave"]},
}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, arch):
    report(fails(compiled(**{"causal": False, **FUNCTIONS[name]}, arch=arch)))


@pytest.mark.parametrize("arch", ARCHES)
def test_b_is_the_number_of_the_sequence(arch):
    (q, k, v, _), told = inputs(QUERIES, KEYS, (4, 2), (128, 128))
    limits = torch.tensor([100, 3, 300, 10, 1, 0, 0, 1, 50], dtype=torch.int32, device="cuda")
    kernel = compiled(causal=False, arch=arch, mask_mod=lambda b, h, q_idx, kv_idx, ends: kv_idx < ends[b])
    found = kernel(q, k, v, *told, mask_aux=(limits,), return_lse=True)
    expected = compiled(causal=False, arch=arch)(q, k, v, *told, seqused_k=limits, return_lse=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0.02)


@pytest.mark.parametrize("arch", ARCHES)
def test_slices_of_one_tensor(arch):
    packed = torch.randn(sum(QUERIES), 3, 4, 128, dtype=torch.bfloat16, device="cuda")
    q, k, v = packed.unbind(1)
    told = (offsets(QUERIES), offsets(QUERIES))
    do = torch.randn_like(q)
    kernel = compiled(arch=arch)
    found = support.evaluate(attend(kernel, told), q, k, v, do)
    same = support.evaluate(attend(kernel, told), *(x.contiguous() for x in (q, k, v)), do)
    for name, x, y in zip(found._fields, found, same, strict=True):
        tolerance = 0.0 if name in ("o", "lse") else 0.05  # dq is a sum in any order
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [(16, 2), (8, 1)])
def test_heads_that_share_a_tile(heads):
    """As many as the hint has room for: a decoding step of many sequences, and a few queries of each."""
    kernel = compiled(arch="sm_90a")
    queries = (1, 17, 0, 9, 1)
    report(fails(kernel, queries, (700, 300, 5, 0, 64), heads, max_seqlen_q=17, foreign=(2,)))


@pytest.mark.parametrize("arch", ARCHES)
def test_twenty_thousand_short_sequences(arch):
    """Of 0 to 16 tokens, and one of 5000, with queries and keys of their own: by a formula in float64, all at once."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randint(0, 17, (20_000,), generator=generator)
    keys = torch.randint(0, 17, (20_000,), generator=generator)
    queries[7777] = keys[7777] = 0
    (q, k, v, do), told = inputs(queries.tolist(), keys.tolist(), (2, 1), (64, 64))
    result = support.evaluate(attend(compiled(64, arch=arch), told), q, k, v, do)
    wide = [padded(x, of) for x, of in zip((q, k, v, do), (told[0], told[1], told[1], told[0]), strict=True)]
    expected, low = (short(*wide, queries.cuda(), keys.cuda(), dtype) for dtype in (torch.float64, torch.bfloat16))
    of_q, of_k = rows_of(told[0]), rows_of(told[1])
    places = {"o": of_q, "dq": of_q, "dk": of_k, "dv": of_k}
    ref = support.Result(**{name: getattr(expected, name)[at] for name, at in places.items()}, lse=expected.lse[of_q].T)
    near = support.Result(**{name: getattr(low, name)[at] for name, at in places.items()}, lse=low.lse[of_q].T)
    report(support.violations(result, ref, near, torch.bfloat16))


def rows_of(of):
    """(sequence, place in it) of each row."""
    lengths = of.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=of.device), lengths)
    return sequence, torch.arange(len(sequence), device=of.device) - of[:-1].long()[sequence]


def padded(x, of):
    """(total, heads, dim) as (batch, 16, heads, dim), with zeros behind each sequence."""
    wide = x.new_zeros(len(of) - 1, 16, *x.shape[1:])
    wide[rows_of(of)] = x
    return wide


def short(q, k, v, do, queries, keys, dtype):
    """Causal attention of padded sequences, and its gradients, by formula: one head of keys."""
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    wide = torch.promote_types(dtype, torch.float32)
    at = torch.arange(16, device=q.device)
    i, j = at[None, :, None], at[None, None, :]
    sees = (j < keys[:, None, None]) & (j <= i + (keys - queries)[:, None, None])
    s = torch.einsum("bihd,bjgd->bihj", q / 8, k).to(wide).masked_fill(~sees[:, :, None], -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where((lse == -math.inf)[..., None], 0.0, torch.softmax(s, -1)).to(dtype)
    dp = torch.einsum("bihd,bjgd->bihj", do, v).to(wide)
    ds = (p.to(wide) * (dp - (p.to(wide) * dp).sum(-1, keepdim=True))).to(dtype)
    o = torch.einsum("bihj,bjgd->bihd", p, v)
    dq = torch.einsum("bihj,bjgd->bihd", ds, k) / 8
    dk = torch.einsum("bihj,bihd->bjd", ds, q / 8)[:, :, None]
    dv = torch.einsum("bihj,bihd->bjd", p, do)[:, :, None]
    return support.Result(o, lse, dq, dk, dv)


@pytest.mark.parametrize("arch", ARCHES)
def test_more_sequences_than_an_axis_of_a_grid_has_places(arch):
    """Of one token each: o is v, and only v has a gradient."""
    lengths = (1,) * 70_000
    (q, k, v, do), told = inputs(lengths, lengths, (2, 1), (64, 64))
    result = support.evaluate(attend(compiled(64, arch=arch), told), q, k, v, do)
    assert torch.equal(result.o, v.expand_as(result.o))
    torch.testing.assert_close(result.lse, (q.float() * k.float()).sum(-1).T / 8, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.dv.float(), do.float().sum(1, keepdim=True), rtol=0.01, atol=0.01)
    assert float(result.dq.abs().max()) < 0.02 and float(result.dk.abs().max()) < 0.02


@pytest.mark.parametrize("arch", ARCHES)
def test_one_long_sequence_among_many_short_ones(arch):
    queries = (3,) * 200 + (3000,) + (7,) * 200
    kernel = compiled(64, arch=arch)
    (q, k, v, do), told = inputs(queries, queries, (2, 2), (64, 64))
    result = support.evaluate(attend(kernel, told), q, k, v, do)
    rows = slice(600, 3600)
    own = (result.o[rows], result.lse[:, rows], result.dq[rows], result.dk[rows], result.dv[rows])
    one = support.Result(*(x[None] for x in own))
    report(support.judge(one, *(x[rows][None] for x in (q, k, v, do)), causal=True))


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_at_all(arch):
    kernel = compiled(64, arch=arch)
    report(fails(kernel, (0, 0), (3, 0), dims=(64, 64)))
    report(fails(kernel, (), (), dims=(64, 64)))
    report(fails(kernel, (4,), (0,), dims=(64, 64)))


@pytest.mark.parametrize("arch", ARCHES)
def test_check_looks_at_the_offsets(arch):
    kernel = compiled(64, arch=arch)
    (q, k, v, _), told = inputs((3, 4), (5, 6), (2, 2), (64, 64))
    kernel(q, k, v, *told, check=True)
    with pytest.raises(ValueError, match="cu_seqlens_q ends with 8 but q has 7 rows"):
        kernel(q, k, v, offsets((3, 5)), told[1], check=True)


def test_a_call_does_not_wait_for_the_device():
    kernel = compiled(64)
    (q, k, v, _), told = inputs((300, 4), (300, 6), (2, 2), (64, 64))
    kernel(q, k, v, *told)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(q, k, v, *told)
    finally:
        torch.cuda.set_sync_debug_mode("default")
