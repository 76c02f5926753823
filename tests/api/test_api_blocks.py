"""`flashgen.block_mask` and `block_mask=` of a call: results as dense attention gives them, and refusals."""

import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import masks
from flashgen.runtime.blocks import KEPT, Request

torch = pytest.importorskip("torch")

LENGTHS = (90, 150)


def by_head(b, h, q_idx, kv_idx):
    return kv_idx % 4 >= h


def of_half(b, h, q_idx, kv_idx, ids):
    return (h < flashgen.heads // 2) | (ids[b, q_idx] == ids[b, kv_idx])


@pytest.fixture
def inputs():
    return support.random_inputs(2, *LENGTHS, 4, 2, 16, dtype=torch.float16, device="cpu")


@pytest.fixture
def ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 4, (2, 150), generator=generator, dtype=torch.int32).sort().values


@pytest.fixture
def kernel():
    return flashgen.compile(16, True, dtype="float16", mask_mod=masks.document)


def made(ids, batch=2, heads=1, lengths=LENGTHS, mask_mod=masks.document, **options):
    options = {"causal": True, "block_size": 16} | options
    return flashgen.block_mask(mask_mod, (ids,), batch, heads, *lengths, **options)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("block_size", [16, 128])
def test_forward_and_backward(inputs, ids, arch, heads, deterministic, block_size):
    options = {"arch": arch, "deterministic": deterministic}
    kernel = flashgen.compile(16, True, dtype="float16", mask_mod=masks.document, **options)
    blocks = made(ids, heads=heads, block_size=block_size)

    def attend(q, k, v):
        return kernel(q, k, v, return_lse=True, mask_aux=(ids,), block_mask=blocks)

    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask")}
    assert not support.failures(attend, *inputs, aux={"mask_ids": ids}, **functions)


def test_the_same_as_without_lists(kernel, inputs, ids):
    q, k, v, _ = inputs
    expected = kernel(q, k, v, mask_aux=(ids,))
    found = kernel(q, k, v, mask_aux=(ids,), block_mask=made(ids))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_attention_takes_it_too(kernel, inputs, ids):
    q, k, v, _ = inputs
    given = {"mask_aux": (ids,), "block_mask": made(ids)}
    found = flashgen.attention(q, k, v, True, mask_mod=masks.document, **given)
    assert torch.equal(found, kernel(q, k, v, **given))


def test_numpy_arrays(kernel, inputs, ids):
    q, k, v = (x.numpy() for x in inputs[:3])
    found = kernel(q, k, v, mask_aux=(ids.numpy(),), block_mask=made(ids.numpy()))
    np.testing.assert_array_equal(found, kernel(*inputs[:3], mask_aux=(ids,), block_mask=made(ids)).numpy())


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (20, 5)}, {"causal": "top-left", "window": (9, 0)}])
def test_masks_without_arrays(inputs, options):
    """Where there is no array, `like` says where the blocks lie."""
    q, k, v, _ = inputs
    kernel = flashgen.compile(16, **({"causal": False} | options), dtype="float16", mask_mod=by_head)
    blocks = flashgen.block_mask(by_head, None, 1, 4, *LENGTHS, like=q, **options)
    expected = kernel(q, k, v)
    torch.testing.assert_close(kernel(q, k, v, block_mask=blocks), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("lengths", [(0, 150), (90, 0)])
def test_lengths_of_zero(kernel, ids, lengths):
    q, k, v, do = support.random_inputs(2, *lengths, 4, 2, 16, dtype=torch.float16, device="cpu")
    blocks = made(ids, lengths=lengths)
    given = {"mask_aux": (ids,), "block_mask": blocks}
    o, lse = kernel(q, k, v, return_lse=True, **given)
    assert torch.all(o == 0) and torch.all(torch.isinf(lse))
    for gradient in kernel.backward(q, k, v, o, lse, do, **given):
        assert torch.all(gradient == 0)
    assert blocks.density() == 0


def test_a_mask_that_hides_all(inputs, ids):
    q, k, v, do = inputs
    kernel = flashgen.compile(16, False, dtype="float16", mask_mod=lambda b, h, q_idx, kv_idx, ids: ids[b, kv_idx] < 0)
    blocks = flashgen.block_mask(
        lambda b, h, q_idx, kv_idx, ids: ids[b, kv_idx] < 0, (ids,), 2, 1, *LENGTHS, block_size=32
    )
    assert blocks.density() == 0
    given = {"mask_aux": (ids,), "block_mask": blocks}
    o, lse = kernel(q, k, v, return_lse=True, **given)
    assert torch.all(o == 0) and torch.all(lse == -torch.inf)
    assert all(torch.all(gradient == 0) for gradient in kernel.backward(q, k, v, o, lse, do, **given))


def test_lists_are_made_once_and_not_kept_without_limit(kernel, inputs, ids):
    q, k, v, _ = inputs
    blocks = made(ids)
    kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    (first,) = blocks._lists.values()
    kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    (again,) = blocks._lists.values()
    assert again is first
    for block in range(1, 2 * KEPT):
        blocks.list_for(Request("kv_list", 8 * block, 16, 1), None)
    assert len(blocks._lists) <= KEPT


def test_the_blocks_that_are_kept_are_what_is_visible(ids):
    blocks = made(ids, causal=False, lengths=(150, 150))
    same = ids[:, :, None] == ids[:, None, :]
    assert blocks.density() >= same.float().mean()
    assert blocks._visible.sum() == same.sum()
    assert blocks._visible.shape == (2, 1, 10, 10)
    assert repr(blocks) == "<flashgen block mask of batch=2, heads=1, seqlen_q=150, seqlen_k=150, blocks of 16>"


def test_a_kernel_without_lists_keeps_its_own(kernel, inputs, ids):
    q, k, v, _ = inputs
    kernel(q, k, v, mask_aux=(ids,), block_mask=made(ids))
    assert not kernel.spec.listed and "kv_list" not in kernel.source["attention_forward"]


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"causal": False}, "is of document_int but this kernel has causal and document_int"),
        ({"window": (8, 0)}, "window8_0"),
        ({"mask_mod": lambda b, h, q, k, ids: ids[b, k] > 0}, "make it with the causal, window and mask_mod"),
        ({"lengths": (91, 150)}, "seqlen_q = 91 but the call has 90"),
        ({"lengths": (90, 149)}, "seqlen_k = 149 but the call has 150"),
        ({"batch": 3}, "batch = 3 but the call has 2"),
        ({"batch": 1}, "batch = 1 but the call has 2"),  # the mask depends on b
        ({"heads": 2}, "heads = 2 but the call has 4"),
    ],
)
def test_a_block_mask_of_something_else_is_refused(kernel, inputs, ids, options, mentions):
    q, k, v, _ = inputs
    refused(kernel, q, k, v, mask_aux=(ids,), block_mask=made(ids, **options), mentions=mentions)


def test_heads_may_be_one_only_where_the_mask_does_not_depend_on_them(inputs, ids):
    q, k, v, _ = inputs
    for mask_mod, aux in ((by_head, None), (of_half, (ids,))):
        kernel = flashgen.compile(16, False, dtype="float16", mask_mod=mask_mod)
        blocks = flashgen.block_mask(mask_mod, aux, 2, 1, *LENGTHS, like=q)
        refused(kernel, q, k, v, mask_aux=aux, block_mask=blocks, mentions="heads = 1 but the call has 4")


def test_arrays_of_another_type_or_library_are_refused(kernel, inputs, ids):
    q, k, v, _ = inputs
    blocks = made(ids.numpy())
    refused(kernel, q, k, v, mask_aux=(ids,), block_mask=blocks, mentions="another library")
    refused(kernel, q, k, v, mask_aux=(ids,), block_mask=made(ids.float()), mentions="arrays of the same types")
    refused(kernel, q, k, v, mask_aux=(ids,), block_mask=ids, mentions="flashgen.block_mask")
    refused(kernel, q, k, v, block_mask=made(ids), mentions="mask_aux has 0 arrays")


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"batch": True}, "batch = True is not an integer"),
        ({"batch": 70000}, "from 0 to 65535"),
        ({"heads": 0}, "heads = 0 must be from 1"),
        ({"seqlen_q": -1}, "seqlen_q = -1"),
        ({"seqlen_q": 2**24 + 1}, "seqlen_q = 16777217 exceeds"),
        ({"seqlen_k": 1.5}, "seqlen_k = 1.5 is not an integer"),
        ({"block_size": 48}, "one of 16, 32, 64, 128"),
        ({"aux": None}, "mask_aux has 0 arrays"),
        ({"mask_mod": None, "aux": None}, "give like=q"),
        ({"mask_mod": 7}, "mask_mod = 7 must be a function"),
        ({"causal": 3}, "causal = 3"),
    ],
)
def test_what_makes_no_block_mask_is_refused(ids, change, mentions):
    given = {"mask_mod": masks.document, "aux": (ids,), "batch": 2, "heads": 1, "seqlen_q": 90, "seqlen_k": 150}
    refused(flashgen.block_mask, **(given | change), mentions=mentions)


def test_torch_compile_leaves_it_out(kernel, inputs, ids):
    q, k, v, _ = inputs
    blocks = made(ids)
    expected = kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    step = torch.compile(lambda q: kernel(q, k, v, mask_aux=(ids,), block_mask=blocks) + 0, backend="eager")
    assert torch.equal(step(q), expected)
