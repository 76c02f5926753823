"""Tracing of mask and score functions: what comes out, what is refused and where the refusal points to."""

import math
from pathlib import Path

import numpy as np
import pytest

import flashgen as fg
from flashgen import masks, scores, trace, variants
from flashgen.spec import Spec

HERE = Path(__file__).name


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, h, q, k: q >= k, "q_idx >= kv_idx"),
        (lambda b, h, q, k: ~((q < k) | (k == 3)), "q_idx >= kv_idx & kv_idx != 3"),
        (lambda b, h, q, k: (q - k) % 4 == 0, "floor_mod(q_idx - kv_idx, 4) == 0"),
        (lambda b, h, q, k: 2 * q // 3 <= k + 1, "floor_div(q_idx * 2, 3) <= kv_idx + 1"),
        (lambda b, h, q, k: True & (q < np.int64(7)), "q_idx < 7"),
        (lambda b, h, q, k: fg.where(h == 0, q > k, k > 3), "h == 0 & q_idx > kv_idx | h != 0 & kv_idx > 3"),
        (lambda b, h, q, k: k < q + fg.seqlen_k - fg.seqlen_q, "kv_idx < q_idx + seqlen_k - seqlen_q"),
        (lambda b, h, q, k: q > 0.5 * k, "float32(q_idx) > float32(kv_idx) * 0.5"),
    ],
)
def test_a_mask_is_its_text(function, expected):
    assert trace.mask(function).text == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: 3 + s, "score + 3.0"),
        (lambda s, b, h, q, k: s / 4, "score * 0.25"),
        (lambda s, b, h, q, k: s / (h + 1), "score * reciprocal(float32(h + 1))"),
        (lambda s, b, h, q, k: -abs(s), "0.0 - abs(score)"),
        (lambda s, b, h, q, k: s**2 + 2**-h, "score * score + exp2(float32(0 - h))"),
        (lambda s, b, h, q, k: fg.where(q > k, s, -math.inf), "select(q_idx > kv_idx, score, -inf)"),
        (lambda s, b, h, q, k: fg.maximum(s, k), "max(score, float32(kv_idx))"),
        (lambda s, b, h, q, k: s * (q > k), "score * float32(select(q_idx > kv_idx, 1, 0))"),
        (lambda s, b, h, q, k: fg.exp(fg.log(2.0)) * s, "score * 2.0"),
    ],
)
def test_a_score_function_is_its_text(function, expected):
    assert trace.score(function).text == expected


def test_functions_that_do_nothing_leave_nothing():
    assert trace.mask(lambda b, h, q, k: True) is None
    assert trace.mask(masks.window(None, None)) is None
    assert trace.score(lambda s, b, h, q, k: s) is None


LINE = "line of the branch"


def branches(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:  # line of the branch
        return kv_idx == 0
    return kv_idx == 1


def test_a_branch_is_refused_with_the_users_file_and_line():
    line = next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {LINE}"))
    with pytest.raises(TypeError, match=rf"{HERE}:{line}: the truth of q_idx > kv_idx .*flashgen\.where"):
        fg.compile(64, mask_mod=branches)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda b, h, q, k: q > k and k > 0, "the truth of q_idx > kv_idx"),
        (lambda b, h, q, k: 0 < q < 9, "the truth of q_idx > 0"),
        (lambda b, h, q, k: max(q, k) > 0, "the truth of"),
        (lambda b, h, q, k: math.sin(q) > 0, "the value of q_idx"),
        (lambda b, h, q, k: [1, 2][q] > 0, "the value of q_idx"),
        (lambda b, h, q, k: any(x > 0 for x in q), "the length of q_idx"),
        (lambda b, h, q, k: (q / 2) % 2 > 0, "// and % are of integers"),
        (lambda b, h, q, k: q & 1, "compare it with something"),
        (lambda b, h, q, k: q > "1", "a str cannot be part"),
        (lambda b, h, q, k: q > np.arange(3), "a ndarray cannot be part"),
    ],
)
def test_what_needs_the_number_is_refused(function, reason):
    with pytest.raises(TypeError, match=f"{HERE}:[0-9]+: .*{reason}|{HERE}:[0-9]+: {reason}"):
        trace.mask(function)


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        (lambda b, h, q, k: q, TypeError, "mask_mod returned an integer, q_idx; compare it"),
        (lambda q, k: q > k, TypeError, "mask_mod is called with b, h, q_idx, kv_idx"),
        (3, TypeError, "mask_mod = 3 must be a function of b, h, q_idx, kv_idx"),
        (lambda b, h, q, k: q % 0 == k, ValueError, "a positive divisor, not 0"),
        (lambda b, h, q, k: q / 0 > k, ZeroDivisionError, "is divided by zero"),
        (lambda b, h, q, k: q > 2**40, ValueError, "exceeds the 32 bits"),
    ],
)
def test_other_refusals(function, error, reason):
    with pytest.raises(error, match=reason):
        trace.mask(function)


def test_a_value_of_another_function_is_refused():
    kept = []
    trace.score(lambda score, b, h, q_idx, kv_idx: kept.append(score) or score + 1)
    with pytest.raises(ValueError, match="mask_mod uses score of another function"):
        trace.mask(lambda b, h, q_idx, kv_idx: kept[0] > 0)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"window": (3, -1)}, ValueError, r"window = \(3, -1\): -1 must be an integer from 0 on, or None"),
        ({"window": (True, 0)}, ValueError, "must be an integer from 0 on"),
        ({"window": 3}, TypeError, "must be a pair"),
        ({"softcap": 0.0}, ValueError, "must be positive and finite"),
        ({"softcap": math.inf}, ValueError, "must be positive and finite"),
        ({"softcap": "3"}, TypeError, "must be a Python number"),
        ({"causal": "left"}, TypeError, "'top-left' or 'bottom-right'"),
        ({"causal": 1}, TypeError, "must be True or False"),
    ],
)
def test_options_are_checked(options, error, reason):
    with pytest.raises(error, match=reason):
        fg.compile(64, **{"causal": False, **options})


def test_specs_are_told_apart_by_the_text_of_their_functions():
    def spec(**options):
        causal, mask, score = variants.functions(False, **options)
        return Spec(64, 64, causal=causal, mask=mask, score=score)

    def ahead(b, h, q_idx, kv_idx):
        return kv_idx < q_idx + 3

    same = spec(mask_mod=ahead)
    assert same == spec(mask_mod=lambda b, h, q, k: k < q + 3) and hash(same) == hash(spec(mask_mod=ahead))
    assert same != spec(mask_mod=lambda b, h, q, k: k < q + 4)
    assert spec(score_mod=lambda s, b, h, q, k: s * q) != spec(score_mod=lambda s, b, h, q, k: s * (q * 1.5))
    assert str(spec(window=(128, None), softcap=2.5, score_mod=scores.alibi)) == (
        "d64_bf16_window128_all_softcap2p5_alibi"
    )
    assert str(same).startswith("d64_bf16_mask_") and len(str(same)) == len("d64_bf16_mask_") + 8
    assert fg.compile(64, False, mask_mod=ahead) is fg.compile(64, False, mask_mod=ahead)


def test_the_functions_work_on_plain_numbers():
    assert fg.exp(0.0) == 1.0 and fg.maximum(2, 3) == 3 and fg.abs(-2) == 2
    assert fg.sigmoid(0.0) == 0.5 and fg.tanh(0.0) == 0.0 and fg.where(True, 1, 2).expr.value == 1


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (lambda b, h, q, k, ids: ids[b, q] == ids[b, k], [("mask_ids", 2, "int32")]),
        (lambda b, h, q, k, chance: chance[h] > 0.5, [("mask_chance", 1, "int32")]),
        (lambda b, h, q, k, x, y: x[y[q], k] % 2 == 0, [("mask_x", 2, "int32"), ("mask_y", 1, "int32")]),
        (lambda b, h, q, k, kept=3: q - k < kept, []),
    ],
)
def test_arrays_are_the_arguments_without_a_default(function, arrays):
    assert [(item.name, item.rank, item.dtype.name) for item in trace.mask(function).arrays] == arrays


def test_types_are_assumed_so_that_the_function_can_be_traced():
    found = trace.score(lambda s, b, h, q, k, table, bucket: s + table[h, bucket[abs(q - k)]])
    assert found.text == "score + score_table[h, score_bucket[abs(q_idx - kv_idx)]]"
    assert [item.dtype.name for item in found.arrays] == ["float32", "int32"]


def test_the_type_of_an_array_is_part_of_the_identity():
    one, other = (trace.score(scores.bias, (trace.DTYPES[name],)) for name in ("float32", "bfloat16"))
    assert one.text == other.text and one != other and (one.name, other.name) == ("bias_float", "bias_bf16")


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda b, h, q, k, ids: q > k, "mask_mod never indexes its argument ids"),
        (lambda b, h, q, k, ids: ids[b] == ids[b, q], "mask_ids has 1 indices or more"),
        (lambda b, h, q, k, ids: ids[b, -1] == 0, "index -1 of mask_ids is negative"),
        (lambda b, h, q, k, ids: ids[q * 0.5] == 0, "mask_ids is indexed by .* a number; use an integer"),
        (lambda b, h, q, k, ids: ids[:, q] == 0, "a slice cannot be part"),
        (lambda b, h, q, k, ids: ids.sum() == 0, "mask_ids.sum is not known while it is traced"),
        (lambda b, h, q, k, ids: max(ids) == 0, "mask_ids is not known while it is traced"),
        (lambda b, h, q, k, ids: ids == q, "cannot be part of a mask"),
    ],
)
def test_what_arrays_are_not(function, complaint):
    with pytest.raises((TypeError, ValueError, AttributeError), match=complaint):
        trace.mask(function)


def test_a_truth_value_counts_as_a_number():
    score = trace.score(lambda score, b, h, q_idx, kv_idx: kv_idx > q_idx)
    assert score.text == "select(kv_idx > q_idx, 1.0, 0.0)"
