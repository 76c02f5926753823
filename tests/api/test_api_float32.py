"""float32 and float64 through the API: results, gradients, precision, what is refused."""

import logging

import numpy as np
import pytest
import support

import flashgen
from flashgen import build, masks, scores
from flashgen.interp import reference
from flashgen.ir.dtype import FP32, TF32
from flashgen.plan.arch import parse_arch
from flashgen.plan.planner import PlanError
from flashgen.runtime.arguments import aligned_rows
from flashgen.runtime.arrays import LIBRARIES
from flashgen.spec import Spec

torch = pytest.importorskip("torch")
SIZES = (2, 37, 45, 4, 2, 24, 16)
OPTIONS = [
    {"causal": True},
    {"causal": "top-left", "window": (9, 3)},
    {"causal": True, "softcap": 2.0},
    {"mask_mod": masks.dilated(3), "score_mod": scores.alibi},
]


def inputs(dtype, seed=0):
    """Normal (q, k, v, do), the same numbers for every type but for their rounding."""
    return [x.to(dtype) for x in support.random_inputs(*SIZES, dtype=torch.float64, device="cpu", seed=seed)]


def errors(result, arrays, kernel):
    """The largest error of each result, in units of the largest number that should be there."""
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    found = {}
    for name, x, want in zip(result._fields, result, support.dense(*arrays, **functions), strict=True):
        assert x.dtype == arrays[0].dtype
        shown = torch.isfinite(want)
        assert torch.equal(torch.isfinite(x), shown), name
        found[name] = float((x.double() - want)[shown].abs().max() / want[shown].abs().max())
    return found


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-13)], ids=str)
def test_as_exact_as_the_type(dtype, bound, options):
    kernel = flashgen.compile(24, head_dim_v=16, dtype=dtype, **{"causal": False} | options)
    arrays = inputs(dtype)
    result = support.evaluate(lambda q, k, v: kernel(q, k, v, return_lse=True), *arrays)
    assert max(errors(result, arrays, kernel).values()) < bound
    by_call = flashgen.attention(*arrays[:3], **{"causal": False} | options)
    assert torch.equal(by_call, result.o)


def test_tf32_rounds_operands_and_nothing_else():
    arrays = inputs(torch.float32)
    kernel = flashgen.compile(24, head_dim_v=16, dtype="float32", precision="tf32")
    result = support.evaluate(lambda q, k, v: kernel(q, k, v, return_lse=True), *arrays)
    found = errors(result, arrays, kernel)
    assert all(1e-5 < error < 2e-3 for error in found.values()), found
    assert kernel.spec.dtype == TF32 and str(kernel.spec) == "d24v16_tf32_causal"
    by_call = flashgen.attention(*arrays[:3], causal=True, precision="tf32")
    assert torch.equal(by_call, result.o)
    rounded = [(x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for x in arrays]
    again = flashgen.attention(*rounded[:3], causal=True, precision="tf32")
    assert torch.equal(again, result.o)


def test_the_default_is_as_good_as_float32():
    kernel = flashgen.compile(24, dtype="float32")
    assert kernel is flashgen.compile(24, dtype=np.float32, precision="3xtf32") and kernel.spec.dtype == FP32
    assert kernel is not flashgen.compile(24, dtype="float32", precision="tf32")


def test_finite_differences_in_float64():
    """What float32 could not tell: the derivative of everything at once, by torch's gradcheck."""
    arrays = support.random_inputs(1, 5, 6, 2, 1, 8, dtype=torch.float64, device="cpu")
    q, k, v, _ = (x.requires_grad_() for x in arrays)
    sinks = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        drop = {"dropout_p": 0.25, "dropout_seed": 7}
        return flashgen.attention(
            q, k, v, causal=True, softcap=2.0, score_mod=scores.alibi, sinks=sinks, return_lse=True, **drop
        )

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_arrays_of_functions_and_lists_in_float64():
    ids = torch.tensor([[0] * 20 + [1] * 25, [0] * 40 + [1] * 5], dtype=torch.int32)
    bias = torch.randn(2, 4, 37, 45, generator=torch.Generator().manual_seed(1))
    q, k, v, _ = inputs(torch.float64)
    options = {"causal": True, "mask_mod": masks.document, "score_mod": scores.bias}
    given = {"mask_aux": (ids,), "score_aux": (bias,)}
    found = flashgen.attention(q, k, v, **options, **given)
    spec = flashgen.compile(24, **options).spec
    aux = {"mask_ids": ids.numpy(), "score_biases": bias.numpy()}
    arrays = [x.numpy() for x in (q, k, v)]
    want, _ = reference.forward(*arrays, causal=True, mask=spec.mask, score=spec.score, aux=aux)
    np.testing.assert_allclose(found.numpy(), want, rtol=0, atol=1e-12)
    blocks = flashgen.block_mask(masks.document, (ids,), 2, 1, 37, 45, causal=True)
    assert torch.equal(flashgen.attention(q, k, v, block_mask=blocks, **options, **given), found)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-13)], ids=str)
def test_packed_sequences(dtype, bound):
    lengths = torch.tensor([0, 11, 11, 37], dtype=torch.int32)
    arrays = support.random_inputs(1, 37, 37, 2, 1, 16, dtype=torch.float64, device="cpu")
    q, k, v, do = (x[0].to(dtype) for x in arrays)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flashgen.varlen_attention(*leaves, lengths, lengths, causal=True, return_lse=True)
    assert o.dtype == lse.dtype == dtype
    gradients = torch.autograd.grad(o, leaves, do)
    for start, stop in ((0, 11), (11, 37)):
        part = slice(start, stop)
        want = support.dense(*(x.detach()[None, part] for x in (q, k, v, do)), causal=True)
        for x, ref in zip((o, *gradients), (want.o, want.dq, want.dk, want.dv), strict=True):
            assert float((x.detach()[part].double() - ref[0]).abs().max()) < bound * (1 + float(ref.abs().max()))


def test_numpy_and_rows_without_keys():
    q, k, v, _ = (x.numpy() for x in inputs(torch.float32))
    o, lse = flashgen.attention(q, k[:, :20], v[:, :20], causal=True, return_lse=True)
    assert o.dtype == lse.dtype == np.float32
    assert (o[:, :17] == 0).all() and (lse[:, :, :17] == -np.inf).all()
    wide = [x.astype(np.float64) for x in (q, k[:, :20], v[:, :20])]
    o, lse = flashgen.attention(*wide, causal=True, return_lse=True)
    assert o.dtype == lse.dtype == np.float64
    assert (o[:, :17] == 0).all() and (lse[:, :, :17] == -np.inf).all()


def test_which_rows_are_aligned():
    """16 bytes are four elements of float32, and eight of 16 bits."""
    for dtype, step in ((torch.float32, 4), (torch.bfloat16, 8)):
        base = torch.zeros(2, 5, 4 * step, dtype=dtype)
        assert aligned_rows(LIBRARIES["torch"], base[..., :step])
        assert aligned_rows(LIBRARIES["numpy"], base[..., :step].float().numpy().astype("f4" if step == 4 else "f2"))
        odd = torch.zeros(2, 5, 4 * step + step // 2, dtype=dtype)
        assert not aligned_rows(LIBRARIES["torch"], odd[..., :step])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16", "precision": "tf32"}, ("precision = 'tf32'", "float32", "bfloat16")),
        ({"dtype": "float64", "precision": "3xtf32"}, ("precision = '3xtf32'", "float32", "float64")),
        ({"dtype": "float32", "precision": "high"}, ("precision = 'high'", "'3xtf32' or 'tf32'")),
        ({"dtype": "float32", "precision": 3}, ("precision = 3", "'3xtf32' or 'tf32'")),
        ({"dtype": "float32", "precision": []}, ("precision = []", "'3xtf32' or 'tf32'")),
    ],
    ids=str,
)
def test_precision_is_refused(options, words):
    with pytest.raises(ValueError) as caught:
        flashgen.compile(64, **options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_precision_of_arrays_is_refused():
    q, k, v, _ = inputs(torch.bfloat16)
    with pytest.raises(ValueError, match=r"precision = 'tf32' is of dtype 'float32' alone; leave it out for bfloat16"):
        flashgen.attention(q, k, v, precision="tf32")
    wide = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"k is bfloat16 but this kernel takes float32"):
        flashgen.attention(wide[0], k, v, precision="tf32")
    with pytest.raises(ValueError, match=r"q is float32 but this kernel takes float64"):
        flashgen.compile(24, head_dim_v=16, dtype="float64")(*wide[:3])


def test_float64_has_no_kernels():
    kernel = flashgen.compile(64, dtype="float64")
    sizes = {"batch": 1, "seqlen_q": 8, "seqlen_k": 8, "heads": 1}
    for ask in (lambda: kernel.source, lambda: kernel.report, lambda: kernel.workspace_bytes(**sizes)):
        with pytest.raises(ValueError, match=r"^dtype = 'float64' has no kernels for a GPU.*use 'float32' there$"):
            ask()
    assert "attention_forward" in kernel.ir and "plan attention_forward" in kernel.explain()
    packed = flashgen.compile(64, dtype="float64", varlen=True)
    with pytest.raises(ValueError, match="float64"):
        packed.workspace_bytes(batch=1, total_q=8, heads=1)


def test_float32_on_hopper_takes_the_portable_kernels(caplog):
    caplog.set_level(logging.INFO, "flashgen")
    spec = Spec(104, 104, FP32)
    made = build.everything(spec, parse_arch("sm_90a")).values()
    assert {stages.plan.arch.name for stages in made} == {"sm_90"}
    assert caplog.text.count("d104_fp32: float32 is multiplied by mma.sync; the sm_90 kernels run") == 1


def test_what_does_not_fit_is_said():
    """Where a block has 99 KiB, the backward of 256 has no room; the forward has."""
    arch = parse_arch("sm_86")
    assert build.forward(Spec(256, 256, FP32), arch)
    with pytest.raises(PlanError, match=r"no tile of attention_backward fits sm_86: .* exceed the 99 KiB of a block"):
        build.backward(Spec(256, 256, FP32), arch)
