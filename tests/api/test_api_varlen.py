"""Packed sequences through the API on the CPU: torch autograd, NumPy, strides, and refusals."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import support  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks  # noqa: E402
from flashgen.runtime import interpret  # noqa: E402

QUERIES, KEYS = (5, 0, 40, 1, 0), (7, 3, 33, 0, 0)


def offsets(lengths):
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def inputs(queries=QUERIES, keys=KEYS, heads=(4, 2), dims=(16, 16), dtype=torch.bfloat16, seed=0):
    """(q, k, v, do) and the two cu_seqlens."""
    sizes = (1, sum(queries), sum(keys), *heads, *dims)
    arrays = support.random_inputs(*sizes, dtype=dtype, device="cpu", seed=seed)
    return [x[0] for x in arrays], (offsets(queries), offsets(keys))


def judged(result, arrays, told, used=None, **options):
    """Sentences on what is wrong with any sequence by itself."""
    (q, k, v, do), (of_q, of_k) = arrays, told
    found = []
    for number in range(len(of_q) - 1):
        rows = slice(of_q[number], of_q[number + 1])
        length = int(of_k[number + 1] - of_k[number]) if used is None else used[number]
        cols = slice(of_k[number], of_k[number] + length)
        own = (result.o[rows], result.lse[:, rows], result.dq[rows], result.dk[cols], result.dv[cols])
        one = support.Result(*(x[None] for x in own))
        wrong = support.judge(one, q[rows][None], k[cols][None], v[cols][None], do[rows][None], **options)
        found += [f"sequence {number}: {sentence}" for sentence in wrong]
    return found


def attend(kernel, told, **options):
    return lambda q, k, v: kernel(q, k, v, *told, return_lse=True, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_sequence_is_attention_by_itself(causal, heads, dtype):
    arrays, told = inputs(heads=heads, dims=(16, 24), dtype=dtype)
    kernel = flashgen.compile(16, causal, head_dim_v=24, dtype=dtype, varlen=True)
    assert not judged(support.evaluate(attend(kernel, told), *arrays), arrays, told, causal=causal)


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_that_are_not_used(deterministic):
    used = (3, 0, 33, 0, 0)
    arrays, told = inputs()
    for number, count in enumerate(used):
        for x in arrays[1:3]:
            x[int(told[1][number]) + count : int(told[1][number + 1])] = float("nan")
    kernel = flashgen.compile(16, True, varlen=True, deterministic=deterministic)
    counts = torch.tensor(used, dtype=torch.int32)
    result = support.evaluate(attend(kernel, told, seqused_k=counts), *arrays)
    assert not judged(result, arrays, told, used, causal=True)
    rest = [slice(3, 7), slice(7, 10)]
    assert all((x[part] == 0).all() for x in (result.dk, result.dv) for part in rest)


def test_slices_of_one_tensor():
    """q, k and v lie beside each other in each row, as a projection leaves them."""
    queries, told = (9, 0, 21), (offsets((9, 0, 21)), offsets((9, 0, 21)))
    packed = torch.randn(30, 3, 2, 16, dtype=torch.bfloat16)
    arrays = [*packed.unbind(1), torch.randn(30, 2, 16, dtype=torch.bfloat16)]
    kernel = flashgen.compile(16, True, varlen=True)
    assert sum(queries) == 30 and not arrays[0].is_contiguous()
    assert not judged(support.evaluate(attend(kernel, told), *arrays), arrays, told, causal=True)


def test_a_gradient_of_one_number_for_all():
    """As that of a sum, whose strides are zero: it is copied."""
    (q, k, v, do), told = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad(flashgen.varlen_attention(*leaves, *told).sum(), leaves)
    expected = torch.autograd.grad(flashgen.varlen_attention(*leaves, *told), leaves, torch.ones_like(do))
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def test_the_function_is_the_kernel():
    arrays, told = inputs()
    kernel = flashgen.compile(16, True, varlen=True)
    expected = kernel(*arrays[:3], *told, return_lse=True)
    found = flashgen.varlen_attention(*arrays[:3], *told, 40, 33, causal=True, return_lse=True, check=True)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert flashgen.compile(16, True, varlen=True) is kernel


def test_masks_and_scores_of_a_sequence():
    """b is the number of the sequence; the arrays of functions come with the call, also beside seqused_k."""
    arrays, told = inputs()
    limits = torch.tensor([2, 3, 30, 1, 1], dtype=torch.int32)
    used = torch.tensor([7, 3, 20, 0, 0], dtype=torch.int32)

    def limited(b, h, q_idx, kv_idx, ends):
        return (kv_idx < ends[b]) & (q_idx >= kv_idx - flashgen.seqlen_k)

    found = flashgen.varlen_attention(*arrays[:3], *told, mask_mod=limited, mask_aux=(limits,), seqused_k=used)
    expected = flashgen.varlen_attention(*arrays[:3], *told, seqused_k=torch.minimum(limits, used))
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    window = flashgen.varlen_attention(*arrays[:3], *told, causal=True, window=(3, 0), softcap=2.0)
    same = flashgen.varlen_attention(*arrays[:3], *told, mask_mod=masks.window(3, 0), softcap=2.0)
    torch.testing.assert_close(window, same, rtol=0, atol=0.02)


def test_numpy():
    (q, k, v, _), told = inputs(dtype=torch.float16)
    given = [x.numpy() for x in (q, k, v, *told)]
    o, lse = flashgen.varlen_attention(*given, return_lse=True)
    expected = flashgen.varlen_attention(q, k, v, *told, return_lse=True)
    np.testing.assert_array_equal(o, expected[0].numpy())
    np.testing.assert_array_equal(lse, expected[1].numpy())


def test_offsets_that_change_before_the_backward_are_noticed():
    (q, k, v, do), told = inputs()
    o = flashgen.varlen_attention(q.requires_grad_(), k, v, *told)
    told[0][1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(do)


def test_workspace_bytes():
    kernel = flashgen.compile(64, True, varlen=True, arch="sm_80")
    block_q = kernel.plan["attention_backward"].sizes["block_q"]
    rows = (1000 // block_q + 7) * block_q
    assert kernel.workspace_bytes(batch=7, total_q=1000, heads=3) == 4 * 3 * (1000 + rows * (2 + 64))
    assert flashgen.compile(64, varlen=True, deterministic=True).workspace_bytes(batch=1, total_q=8, heads=1) < 4 * 1000


REFUSED = [
    ({"q": lambda q: q[None]}, "q has 4 dimensions and needs 3"),
    ({"v": lambda v: v[:, 0]}, "v has 2 dimensions and needs 3"),
    ({"q": lambda q: q.half()}, "k is bfloat16 but this kernel takes float16"),
    ({"k": lambda k: k[:, :, :8]}, "k has head_dim 8 but this kernel takes 16"),
    ({"k": lambda k: k[1:]}, "k and v disagree in total_k"),
    ({"v": lambda v: v[:, :1]}, "k and v disagree in heads_kv"),
    ({"q": lambda q: q[:, :3]}, "heads of q = 3 must be a positive multiple"),
    ({"q": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)}, "q's last dimension is not contiguous"),
    ({"cu_seqlens_q": lambda x: x.long()}, "cu_seqlens_q is int64 and must be int32"),
    ({"cu_seqlens_k": lambda x: x[None]}, "cu_seqlens_k has 2 dimensions and needs 1"),
    ({"cu_seqlens_k": lambda x: x.repeat_interleave(2)[::2]}, "cu_seqlens_k is not contiguous"),
    ({"cu_seqlens_k": lambda x: x[:-1]}, "cu_seqlens_q and cu_seqlens_k have 6 and 5 elements"),
    ({"cu_seqlens_q": lambda x: x[:0], "cu_seqlens_k": lambda x: x[:0]}, "cu_seqlens_q has no element"),
    ({"cu_seqlens_q": lambda x: x[:1], "cu_seqlens_k": lambda x: x[:1]}, "there is no sequence for 46 and 43 rows"),
    ({"q": lambda q: q[:1].expand(2**30 + 1, -1, -1)}, "q has 1073741825 rows, more than 1073741824 in one call"),
    ({"cu_seqlens_q": lambda x: x + 1}, "cu_seqlens_q starts with 1"),
    ({"cu_seqlens_q": lambda x: x.clone().put_(torch.tensor(2), torch.tensor(2).int())}, "cu_seqlens_q falls behind"),
    ({"cu_seqlens_k": lambda x: torch.clamp(x, max=20)}, "cu_seqlens_k ends with 20 but k has 43 rows"),
    ({"cu_seqlens_k": lambda x: x.tolist()}, "cu_seqlens_k is of type list"),
    ({"cu_seqlens_k": lambda x: x.numpy()}, "cu_seqlens_k is not of torch as q is"),
    ({"seqused_k": lambda _: torch.ones(4, dtype=torch.int32)}, "seqused_k has 4 elements for 5 sequences"),
    ({"seqused_k": lambda _: torch.ones(5)}, "seqused_k is float32 and must be int32"),
    ({"seqused_k": lambda _: torch.tensor([8, 0, 0, 0, 0]).int()}, "seqused_k must be from 0 to the keys"),
    ({"max_seqlen_q": lambda _: -1}, "max_seqlen_q = -1 is negative"),
    ({"max_seqlen_k": lambda _: 2.5}, "max_seqlen_k = 2.5 is not an integer"),
    ({"max_seqlen_q": lambda _: torch.tensor(1.5)}, "max_seqlen_q"),
    ({"scale": lambda _: -1.0}, "scale = -1.0 must be positive"),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refusals(changes, sentence, monkeypatch):
    """Before anything runs."""
    monkeypatch.setattr(interpret, "_run", lambda *_: pytest.fail("it ran"))
    (q, k, v, _), told = inputs()
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": told[0], "cu_seqlens_k": told[1]}
    given |= {name: change(given.get(name)) for name, change in changes.items()}
    with pytest.raises((ValueError, TypeError)) as error:
        flashgen.varlen_attention(**given)
    assert sentence in str(error.value)


def test_what_compile_refuses():
    with pytest.raises(TypeError, match="varlen = 1 must be True or False"):
        flashgen.compile(16, varlen=1)
    with pytest.raises(ValueError, match="layout = 'bhsd' with varlen"):
        flashgen.compile(16, varlen=True, layout="bhsd")


def test_a_padded_batch_is_packed_too():
    q, k, v = (torch.randn(3, 20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    used = torch.tensor([20, 0, 7], dtype=torch.int32)
    told = (torch.arange(4, dtype=torch.int32) * 20,) * 2
    o = flashgen.varlen_attention(*(x.flatten(0, 1) for x in (q, k, v)), *told, seqused_k=used).unflatten(0, (3, 20))
    for number, count in enumerate(used.tolist()):
        one = slice(number, number + 1)
        expected = flashgen.attention(q[one], k[one, :count], v[one, :count])
        torch.testing.assert_close(o[one], expected, rtol=0, atol=0.01)
