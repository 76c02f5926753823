"""The checker of the GPU suite must reject what is wrong: planted errors, each of a kind that kernels have."""

import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import support  # noqa: E402

from flashgen.interp import reference  # noqa: E402

SHAPE = {"batch": 2, "seqlen_q": 37, "seqlen_k": 29, "heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 24}


def case(dtype=torch.bfloat16, **changes):
    return support.random_inputs(**(SHAPE | changes), dtype=dtype, device="cpu")


def honest(q, k, v, do, *, causal=True, dlse=None, **options):
    """What a good kernel gives: the float64 result rounded once; its LSE in fp32."""
    ref = support.dense(q, k, v, do, causal=causal, dlse=dlse, **options)
    return support.Result(*(x.to(torch.float32 if name == "lse" else q.dtype) for name, x in ref._asdict().items()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(37, 29), (8, 20), (3, 0), (0, 4), (1, 1)])
def test_dense_agrees_with_the_reference(seqlen_q, seqlen_k, causal):
    q, k, v, do = case(torch.float64, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    dlse = torch.randn(2, 4, seqlen_q, dtype=torch.float64)
    result = support.dense(q, k, v, do, causal=causal, dlse=dlse, scale=0.3)
    arrays = [x.numpy() for x in (q, k, v, do, dlse)]
    want = [*reference.forward(*arrays[:3], causal=causal, scale=0.3)]
    want += reference.backward(*arrays, causal=causal, scale=0.3)
    for x, y in zip(result, want, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 8, 37, 100])
def test_dense_in_chunks_is_dense(rows):
    inputs = case(torch.float64, seqlen_k=37)
    want = support.dense(*inputs, causal=True)
    for x, y in zip(support.dense_in_chunks(*inputs, rows=rows), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    inputs = case(seqlen_k=37)
    low = support.dense_in_chunks(*inputs, rows=rows, dtype=torch.bfloat16)
    assert low.dk.dtype == torch.bfloat16
    assert support.judge(low._replace(lse=honest(*inputs).lse), *inputs, causal=True) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_honest_result_passes(dtype):
    inputs = case(dtype)
    assert support.judge(honest(*inputs), *inputs, causal=True) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rule_itself_passes_the_low_result(dtype):
    inputs = case(dtype)
    low = support.dense(*inputs, causal=True, dtype=dtype)
    assert support.judge(low._replace(lse=honest(*inputs).lse), *inputs, causal=True) == []


def spoil(result, name, change):
    x = getattr(result, name).clone()
    change(x)
    return result._replace(**{name: x})


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_wrong_element_is_found(name, dtype):
    inputs = case(dtype)
    wrong = spoil(honest(*inputs), name, lambda x: x[1, -1, 0, 3].add_(0.125))
    found = support.judge(wrong, *inputs, causal=True)
    assert len(found) == 1 and found[0].startswith(f"{name}: error") and "(1, " in found[0], found


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_one_nan_is_found(name):
    inputs = case()
    wrong = spoil(honest(*inputs), name, lambda x: x[(-1,) * x.ndim].fill_(math.nan))
    assert [s.split(":")[0] for s in support.judge(wrong, *inputs, causal=True)] == [name]


@pytest.mark.parametrize("name", ["o", "lse", "dq", "dk", "dv"])
def test_a_wrong_shape_or_dtype_is_found(name):
    inputs = case()
    right = honest(*inputs)
    for x in (getattr(right, name)[:1], getattr(right, name).double()):
        found = support.judge(right._replace(**{name: x}), *inputs, causal=True)
        assert len(found) == 1 and "instead of" in found[0], found


def wrong_attention(kind):
    """A result that is wrong as kernels are: another mask, scale, head map, base of the logarithm."""
    q, k, v, do = case()
    if kind == "mask forgotten":
        return honest(q, k, v, do, causal=False)
    if kind == "scale":
        return honest(q, k, v, do, scale=1 / math.sqrt(24))
    if kind == "heads interleaved":
        return honest(q.unflatten(2, (2, 2)).transpose(2, 3).flatten(2, 3), k, v, do)
    if kind == "lse in base 2":
        right = honest(q, k, v, do)
        return right._replace(lse=right.lse / math.log(2))
    if kind == "last key dropped":
        return honest(q, torch.cat([k[:, :-1], k[:, -1:] * 0], 1), v, do)
    assert kind == "lse of masked rows is 0"
    right = honest(q, k, v, do)
    return right._replace(lse=right.lse.clamp_min(-100))


@pytest.mark.parametrize(
    "kind",
    ["mask forgotten", "scale", "heads interleaved", "lse in base 2", "last key dropped", "lse of masked rows is 0"],
)
def test_wrong_attention_is_found(kind):
    assert support.judge(wrong_attention(kind), *case(), causal=True)


def test_the_gradient_of_the_lse_is_judged():
    inputs = case()
    dlse = torch.randn(2, 4, 37)
    assert support.judge(honest(*inputs, dlse=dlse), *inputs, causal=True, dlse=dlse) == []
    found = support.judge(honest(*inputs), *inputs, causal=True, dlse=dlse)
    assert {s.split(":")[0] for s in found} == {"dq", "dk"}, found


def test_rounding_is_never_zero():
    """A gradient that is exactly 0 in the reference (one key) may still come out as 1e-7."""
    assert 1e-3 < support.rounding(torch.zeros(3), torch.bfloat16) < 2e-3
    assert 0 < support.rounding(torch.zeros(3), torch.float16) < 2e-4
