"""`seqused_k` of batches of one length through the API on the CPU: torch's autograd, NumPy, layouts and refusals."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import denominators  # noqa: E402
import support  # noqa: E402
from test_api_refusals import refused  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

USED = (30, 0, 17, 1)
COUNTS = torch.tensor(USED, dtype=torch.int32)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window and softcap": {"causal": True, "window": (9, 3), "softcap": 2.0},
    "deterministic": {"deterministic": True, "score_mod": scores.alibi},
}


def inputs(lengths=(21, 30), dtype=torch.float16, dims=(16, 16)):
    """q, k, v and the gradient of o; keys and values behind those that are used are NaN."""
    arrays = support.random_inputs(4, *lengths, 4, 2, *dims, dtype=dtype, device="cpu")
    for number, used in enumerate(USED):
        for x in arrays[1:3]:
            x[number, used:] = float("nan")
    return arrays


def dense(q, k, v, sinks=None, *, keep=None, dtype=torch.float64, **options):
    """(o, lse): `denominators.dense` of each batch and its own keys."""
    found = []
    for number, used in enumerate(USED):
        one = slice(number, number + 1)
        own = None if keep is None else keep[one, ..., :used]
        found.append(denominators.dense(q[one], k[one, :used], v[one, :used], sinks, keep=own, dtype=dtype, **options))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def failures(attend, arrays, do, **options):
    """Sentences on what `attend(q, k, v[, sinks])` gets wrong, forward and backward."""
    dlse = torch.randn(do.shape[0], do.shape[2], do.shape[1])
    o, lse, gradients = denominators.evaluate(attend, arrays, do, dlse)
    ref, low = (
        denominators.evaluate(lambda *x, dtype=dtype: dense(*x, **options, dtype=dtype), arrays, do, dlse, dtype)
        for dtype in (torch.float64, do.dtype)
    )
    found = [support.lse_violation(lse, ref[1]), support.violation("o", o, ref[0], low[0], 2.0, do.dtype)]
    for name, x, exact, rough in zip(denominators.NAMES, gradients, ref[2], low[2], strict=False):
        found.append(support.violation(name, x, exact, rough, 3.0, do.dtype))
    return [sentence for sentence in found if sentence]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [(21, 30), (1, 30), (50, 30)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_batch_has_keys_of_its_own(options, lengths, dtype):
    """Gradients of what lies behind are zero: those of the oracle's slices."""
    *arrays, do = inputs(lengths, dtype, (16, 24))
    kernel = flashgen.compile(16, **{"causal": False} | OPTIONS[options], head_dim_v=24, dtype=dtype)
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    assert not failures(lambda *x: kernel(*x, seqused_k=COUNTS, return_lse=True), arrays, do, **functions)


def test_sinks_and_dropout():
    *arrays, do = inputs()
    sinks = torch.tensor([0.3, -1.0, 2.5, 0.0])
    given = {"dropout_p": 0.25, "dropout_seed": 2**63 + 17}
    kernel = flashgen.compile(16, True, dtype="float16", sinks=True, dropout=True)
    keep = torch.from_numpy(flashgen.dropout_mask(2**63 + 17, 0, 0.25, 4, 4, 21, 30))

    def attend(q, k, v, t):
        return kernel(q, k, v, sinks=t, seqused_k=COUNTS, return_lse=True, **given)

    assert not failures(attend, [*arrays, sinks], do, causal=True, keep=keep, p=0.25)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_numpy_and_layouts(layout):
    q, k, v, _ = (x if layout == "bshd" else x.transpose(1, 2).contiguous() for x in inputs())
    kernel = flashgen.compile(16, True, dtype="float16", layout=layout)
    expected = kernel(q, k, v, seqused_k=COUNTS, check=True)
    assert torch.equal(flashgen.attention(q, k, v, True, layout=layout, seqused_k=COUNTS), expected)
    host = [x.numpy() for x in (q, k, v)]
    np.testing.assert_array_equal(kernel(*host, seqused_k=COUNTS.numpy()), expected.numpy())
    o, lse = kernel.forward(*host, seqused_k=COUNTS.numpy())
    assert [x.shape for x in kernel.backward(*host, o, lse, o, seqused_k=COUNTS.numpy())] == [x.shape for x in host]


def test_all_keys_are_as_without():
    q, k, v, do = support.random_inputs(4, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")
    kernel = flashgen.compile(16, True, dtype="float16")
    found, expected = (
        support.evaluate(lambda *x, given=given: kernel(*x, return_lse=True, **given), q, k, v, do)
        for given in ({"seqused_k": torch.full((4,), 30, dtype=torch.int32)}, {})
    )
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_mask_that_reads_its_length_says_the_same():
    *arrays, _ = support.random_inputs(4, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")
    found = flashgen.attention(*arrays, seqused_k=COUNTS)
    limited = flashgen.attention(*arrays, mask_mod=lambda b, h, q, k, ends: k < ends[b], mask_aux=(COUNTS,))
    torch.testing.assert_close(found, limited, atol=1e-3, rtol=1e-3)


def test_the_kernel_is_another_and_one_object():
    kernel = flashgen.compile(16, True)
    used = kernel.resolve(seqused_k=COUNTS)[0]
    assert str(used.spec) == "d16_bf16_causal_used" and kernel.resolve(seqused_k=COUNTS)[0] is used
    assert kernel.resolve()[0] is kernel and "seqused_k" not in kernel.ir["attention_forward"]


def by_parity(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


def test_beside_lists_of_blocks():
    *arrays, do = inputs((21, 30))
    kernel = flashgen.compile(16, False, dtype="float16", mask_mod=masks.document)
    ids = torch.arange(30, dtype=torch.int32).repeat(4, 1) // 11
    blocks = flashgen.block_mask(masks.document, (ids,), 4, 1, 21, 30, block_size=16)
    given = {"mask_aux": (ids,), "seqused_k": COUNTS, "return_lse": True}
    found, expected = (
        support.evaluate(lambda *x, more=more: kernel(*x, **given, **more), *arrays, do)
        for more in ({"block_mask": blocks}, {})
    )
    for name, x, y in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (8, 0)}])
def test_lists_of_a_mask_that_depends_on_the_number_of_keys_are_refused(options):
    q, k, v, _ = inputs()
    kernel = flashgen.compile(16, **{"causal": False} | options, dtype="float16", mask_mod=by_parity)
    blocks = flashgen.block_mask(by_parity, None, 1, 1, 21, 30, like=q, **options)
    kernel(q, k, v, block_mask=blocks)
    refused(kernel, q, k, v, block_mask=blocks, seqused_k=COUNTS, mentions=["depends on seqlen_k", "leave block_mask"])


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        (COUNTS[:3], ["seqused_k has 3 elements for a batch of 4", "(batch,)"]),
        (COUNTS[None], ["seqused_k has 2 dimensions and needs 1"]),
        (COUNTS.long(), ["seqused_k is int64 and must be int32"]),
        (COUNTS.repeat_interleave(2)[::2], ["seqused_k is not contiguous"]),
        (COUNTS.numpy(), ["seqused_k is not of torch as q is"]),
        (USED, ["seqused_k is of type tuple"]),
        (30, ["seqused_k is of type int"]),
        (COUNTS + 1, ["seqused_k must be from 0 to the keys"]),
        (COUNTS - 1, ["seqused_k must be from 0 to the keys"]),
    ],
    ids=str,
)
def test_what_is_refused(given, mentions):
    q, k, v, _ = inputs()
    refused(flashgen.compile(16, dtype="float16"), q, k, v, seqused_k=given, mentions=mentions)
    refused(flashgen.attention, q, k, v, seqused_k=given, mentions=mentions)


def test_torch_compile_leaves_it_out():
    q, k, v, _ = inputs()
    expected = flashgen.attention(q, k, v, seqused_k=COUNTS)
    step = torch.compile(lambda q: flashgen.attention(q, k, v, seqused_k=COUNTS) + 0, backend="eager")
    assert torch.equal(step(q), expected)
