"""`check=True`: functions that read outside of their arrays, and numbers of keys that there are not, are refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import support  # noqa: E402
from test_api_refusals import refused  # noqa: E402
from test_api_varlen import inputs as packed_inputs  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen import checks, masks, scores  # noqa: E402


@pytest.fixture
def inputs():
    return support.random_inputs(3, 70, 150, 4, 2, 16, dtype=torch.float16, device="cpu")[:3]


def compiled(causal=False, **options):
    return fg.compile(16, causal, dtype="float16", **options)


def far(score, b, h, q_idx, kv_idx, table):
    """Of causal masks the distance is never negative."""
    return score + table[h, q_idx + (fg.seqlen_k - fg.seqlen_q) - kv_idx]


def guarded(score, b, h, q_idx, kv_idx, table):
    return fg.where(kv_idx < 20, table[h, kv_idx], score)


def through(score, b, h, q_idx, kv_idx, table, bucket):
    return score + table[bucket[kv_idx], h]


FIRST_KEYS = {  # every one of them sees the first 20 keys alone, by a row of 20
    "the second part of and": lambda b, h, q_idx, kv_idx, row: (kv_idx < 20) & (row[kv_idx] >= 0),
    "the second part of or": lambda b, h, q_idx, kv_idx, row: ~((kv_idx >= 20) | (row[kv_idx] < 0)),
    "where": lambda b, h, q_idx, kv_idx, row: fg.where(kv_idx < 20, row[kv_idx] >= 0, False),
    "an index within": lambda b, h, q_idx, kv_idx, row: (kv_idx < 20) & (row[fg.minimum(kv_idx, 19)] >= 0),
}


@pytest.mark.parametrize("name", FIRST_KEYS)
def test_what_decides_nothing_does_not_count(inputs, name):
    row = torch.zeros(20, dtype=torch.int32)
    kernel = compiled(mask_mod=FIRST_KEYS[name])
    expected = kernel(*inputs, mask_aux=(row,))
    assert torch.equal(kernel(*inputs, mask_aux=(row,), check=True), expected)
    if name != "an index within":
        refused(kernel, *inputs, mask_aux=(row[:19],), check=True, mentions=["mask_mod", "mask_aux's row", "(19,)"])


def test_a_score_counts_where_its_element_is_seen(inputs):
    table = torch.zeros(4, 150)
    compiled(True, score_mod=far)(*inputs, score_aux=(table,), check=True)
    refused(compiled(score_mod=far), *inputs, score_aux=(table,), check=True, mentions=["score_mod reads outside"])
    compiled(window=(70, 0), score_mod=far)(*inputs, score_aux=(table[:, :71],), check=True)
    refused(
        compiled(window=(71, 0), score_mod=far), *inputs, score_aux=(table[:, :71],), check=True, mentions="(4, 71)"
    )
    compiled(score_mod=guarded)(*inputs, score_aux=(table[:, :20],), check=True)


def test_each_axis_and_each_array(inputs):
    """Also an index that is loaded from another array; the message names the one that is read outside of."""
    bucket, table = torch.arange(150, dtype=torch.int32) // 10, torch.zeros(15, 4)
    kernel = compiled(score_mod=through)
    kernel(*inputs, score_aux=(table, bucket), check=True)
    refused(kernel, *inputs, score_aux=(table[:14], bucket), check=True, mentions="score_aux's table, of shape (14, 4)")
    refused(kernel, *inputs, score_aux=(table[:, :3], bucket), check=True, mentions="score_aux's table")
    refused(kernel, *inputs, score_aux=(table, bucket[:149]), check=True, mentions="score_aux's bucket")
    refused(kernel, *inputs, score_aux=(table, bucket - 1), check=True, mentions="score_aux's table")


def test_unchecked_it_is_as_before(inputs):
    ids = torch.zeros(3, 149, dtype=torch.int32)
    kernel = compiled(mask_mod=masks.document)
    kernel(*inputs, mask_aux=(ids,))
    refused(kernel, *inputs, mask_aux=(ids,), check=True, mentions="mask_aux's ids")
    with pytest.raises(ValueError, match="mask_aux's ids"):
        fg.attention(*inputs, mask_mod=masks.document, mask_aux=(ids,), check=True)


def test_numpy_and_other_layouts(inputs):
    q, k, v = (x.transpose(1, 2).contiguous().numpy() for x in inputs)
    bias = np.zeros((3, 4, 70, 150), np.float32)
    kernel = compiled(score_mod=scores.bias, layout="bhsd")
    kernel(q, k, v, score_aux=(bias,), check=True)
    refused(kernel, q, k, v, score_aux=(bias[:, :, :, 1:],), check=True, mentions="score_aux's biases")


def test_used_keys_alone_are_read_for(inputs):
    ids, used = torch.zeros(3, 100, dtype=torch.int32), torch.tensor([100, 0, 64], dtype=torch.int32)
    kernel = compiled(mask_mod=masks.document)
    kernel(*inputs, mask_aux=(ids,), seqused_k=used, check=True)
    refused(kernel, *inputs, mask_aux=(ids,), seqused_k=used + 1, check=True, mentions="mask_aux's ids")
    refused(kernel, *inputs, mask_aux=(ids,), seqused_k=used * 2, check=True, mentions="seqused_k must be from 0")


def test_packed_sequences_are_read_for_by_their_own_lengths():
    (q, k, v, _), told = packed_inputs((5, 0, 90, 1, 0), (7, 3, 83, 0, 0))
    kernel = fg.compile(16, varlen=True, mask_mod=lambda b, h, q_idx, kv_idx, ids: ids[b, kv_idx] >= 0)
    ids = torch.zeros(4, 83, dtype=torch.int32)  # the fourth sequence and the fifth have no keys
    kernel(q, k, v, *told, mask_aux=(ids,), check=True)
    kernel(q, k, v, *told, mask_aux=(ids[:3],), check=True)
    refused(kernel, q, k, v, *told, mask_aux=(ids[:2],), check=True, mentions="mask_aux's ids, of shape (2, 83)")
    refused(kernel, q, k, v, *told, mask_aux=(ids[:, :82],), check=True, mentions="mask_aux's ids")
    used = torch.tensor([7, 3, 60, 0, 0], dtype=torch.int32)
    kernel(q, k, v, *told, mask_aux=(ids[:, :60],), seqused_k=used, check=True)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_nothing_to_read_for(lengths):
    q, k, v, _ = support.random_inputs(2, *lengths, 4, 2, 16, dtype=torch.float16, device="cpu")
    ids = torch.zeros(2, 5, dtype=torch.int32)
    compiled(mask_mod=masks.document)(q, k, v, mask_aux=(ids,), check=True)


def test_functions_without_arrays_are_not_evaluated(inputs, monkeypatch):
    monkeypatch.setattr(checks, "check_reads", lambda *_: pytest.fail("it was"))
    compiled(mask_mod=masks.dilated(3), score_mod=scores.alibi)(*inputs, check=True)
