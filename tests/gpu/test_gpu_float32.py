"""float32 on the GPU, forward and backward, against dense float64 attention: as exact as float32, or as TF32.

Errors are measured in units of the largest number that should be there, of 1 at least.
"""

import logging

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from functions import MASKS, SCORES  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

BOUNDS = {"3xtf32": 1e-5, "tf32": 4e-3}
LENGTHS = ((113, 203), (512, 256), (1, 300), (700, 1100))  # ragged, rows that see no key, many tiles


def smooth(score, b, h, q_idx, kv_idx):
    """No jump in its derivative, which where a score is near the jump would be right on either side."""
    return 2.5 * flashgen.sigmoid(score) + 0.1 * score


DRAWS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"mask_mod": masks.sink_window(100, 0), "score_mod": scores.alibi},
    "by head": {"mask_mod": MASKS["by head"], "score_mod": SCORES["wave"]},
    "smooth": {"causal": "top-left", "score_mod": smooth},
    "nothing": {"mask_mod": MASKS["nothing"]},
}


def inputs(seqlen_q, seqlen_k, heads, head_dim, seed=0, batch=2):
    sizes = (batch, seqlen_q, seqlen_k, *heads, head_dim)
    return support.random_inputs(*sizes, dtype=torch.float32, device="cuda", seed=seed)


def wrong(result, want, bound):
    """Sentences on results that are further off than the bound; -inf of the LSE must be where it should be.

    A gradient that is small is the difference of numbers near 1.
    """
    found = []
    for name, x, ref in zip(result._fields, result, want, strict=True):
        shown = torch.isfinite(ref)
        if x.dtype != torch.float32 or not torch.equal(torch.isfinite(x), shown):
            found.append(f"{name}: {x.dtype}, or other elements are finite")
            continue
        error = float(torch.where(shown, x.double() - ref, 0.0).abs().max())
        limit = bound * max(1.0, float(torch.where(shown, ref, 0.0).abs().max()))
        found += [f"{name}: error {error:.3g} exceeds {limit:.3g}"] * (not error <= limit)
    return found


def fails(kernel, head_dim, bound, lengths=LENGTHS, heads=(4, 2), **given):
    """Sentences on what the kernel gets wrong at some lengths. What sums cut off grows with the head dim."""
    found = []
    bound *= max(1.0, head_dim / 128)
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        arrays = inputs(seqlen_q, seqlen_k, heads, head_dim, seed)
        result = support.evaluate(lambda q, k, v: kernel(q, k, v, return_lse=True, **given), *arrays)
        sentences = wrong(result, support.dense(*arrays, **functions), bound)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    return found


def report(found):
    assert not found, f"{len(found)} failures\n" + "\n".join(found)


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_function_forward_and_backward(draw, precision):
    options = {"causal": False} | DRAWS[draw]
    kernel = flashgen.compile(64, dtype="float32", precision=precision, **options)
    report(fails(kernel, 64, BOUNDS[precision]))


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("head_dim", [32, 40, 96, 128, 256])
def test_other_head_dims(head_dim, precision):
    kernel = flashgen.compile(head_dim, True, dtype="float32", precision=precision)
    report(fails(kernel, head_dim, BOUNDS[precision], LENGTHS[:3]))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_deterministic(head_dim):
    kernel = flashgen.compile(head_dim, True, dtype="float32", deterministic=True)
    report(fails(kernel, head_dim, BOUNDS["3xtf32"], LENGTHS[:2]))


def test_values_narrower_than_keys_and_the_other_layout():
    q, k, v, do = inputs(150, 170, (4, 2), 96)
    v, do = v[..., :64].contiguous(), do[..., :64].contiguous()
    kernel = flashgen.compile(96, True, head_dim_v=64, dtype="float32", layout="bhsd")

    def attend(q, k, v):
        o, lse = kernel(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), return_lse=True)
        return o.transpose(1, 2), lse

    result = support.evaluate(attend, q, k, v, do)
    report(wrong(result, support.dense(q, k, v, do, causal=True), BOUNDS["3xtf32"]))


def test_rows_that_are_not_aligned():
    """Rows of 65 numbers: element by element."""
    arrays = inputs(113, 203, (4, 2), 65)
    arrays = [x[..., :64] for x in arrays]
    kernel = flashgen.compile(64, True, dtype="float32")
    result = support.evaluate(lambda q, k, v: kernel(q, k, v, return_lse=True), *arrays)
    report(wrong(result, support.dense(*arrays, causal=True), BOUNDS["3xtf32"]))


def test_packed_sequences():
    lengths = (113, 0, 1, 300, 64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q, k, v, do = (x[0] for x in inputs(sum(lengths), sum(lengths), (4, 2), 64, batch=1))
    kernel = flashgen.compile(64, True, dtype="float32", varlen=True)
    result = support.evaluate(lambda q, k, v: kernel(q, k, v, offsets, offsets, return_lse=True), q, k, v, do)
    for start, length in zip(offsets.tolist(), lengths, strict=False):
        rows = slice(start, start + length)
        own = (result.o[rows], result.lse[:, rows], *(x[rows] for x in (result.dq, result.dk, result.dv)))
        want = support.dense(*(x[None, rows] for x in (q, k, v, do)), causal=True)
        if length:
            report(wrong(support.Result(*(x[None] for x in own)), want, BOUNDS["3xtf32"]))


def test_dropout_and_sinks():
    """The mask of dropout is that of the reference, and float64 on the interpreter is the judge of the gradients."""
    q, k, v, do = inputs(113, 203, (4, 2), 64, batch=1)
    sinks = torch.linspace(-3.0, 4.0, 4, device="cuda")
    options = {"causal": True, "dropout_p": 0.2, "dropout_seed": 2**63 + 99, "dropout_offset": 3}
    results = {}
    for kind, device in ((torch.float32, "cuda"), (torch.float64, "cpu")):
        leaves = [x.detach().to(device, kind).requires_grad_() for x in (q, k, v, sinks)]
        o, lse = flashgen.attention(*leaves[:3], sinks=leaves[3], return_lse=True, **options)
        gradients = torch.autograd.grad(o, leaves, do.to(device, kind))
        results[device] = [x.detach().double().cpu() for x in (o, lse, *gradients)]
    for x, want in zip(results["cuda"], results["cpu"], strict=True):
        assert float((x - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))


def test_lists_of_blocks():
    ids = (torch.arange(700, device="cuda") // 130).int()[None].expand(2, 700)
    arrays = inputs(700, 700, (4, 2), 64)
    blocks = flashgen.block_mask(masks.document, (ids,), 2, 1, 700, 700, causal=True)
    kernel = flashgen.compile(64, True, mask_mod=masks.document, dtype="float32")
    given = {"return_lse": True, "mask_aux": (ids,), "block_mask": blocks}
    result = support.evaluate(lambda q, k, v: kernel(q, k, v, **given), *arrays)
    want = support.dense(*arrays, causal=True, mask=kernel.spec.mask, aux={"mask_ids": ids})
    report(wrong(result, want, BOUNDS["3xtf32"]))


def test_sums_over_many_keys_are_not_cut_off():
    """Positive values: what the tensor cores cut off of each sum would all go one way, 1e-4 over so many keys."""
    q, k, v, do = inputs(64, 32768, (1, 1), 64, batch=1)
    v = v.abs() + 1.0
    o, lse = flashgen.attention(q, k, v, return_lse=True)
    scores_of = (q[0, :, 0].double() @ k[0, :, 0].double().T) / 8
    want = torch.softmax(scores_of, -1) @ v[0, :, 0].double()
    relative = ((o[0, :, 0].double() - want) / want).abs()
    assert float(relative.max()) < 5e-6
    # dv of a key is a sum over queries: the same with the roles changed
    q, k, v, do = inputs(32768, 64, (1, 1), 64, batch=1)
    do = do.abs() + 1.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    (dv,) = torch.autograd.grad(flashgen.attention(*leaves), leaves[2:], do)
    p = torch.softmax((q[0, :, 0].detach().double() @ k[0, :, 0].detach().double().T) / 8, -1)
    want = p.T @ do[0, :, 0].double()
    assert float(((dv[0, :, 0].double() - want) / want).abs().max()) < 5e-6
    assert torch.isfinite(lse).all()


def test_the_deterministic_backward_repeats():
    arrays = inputs(700, 1100, (4, 2), 64)
    kernel = flashgen.compile(64, True, dtype="float32", deterministic=True)
    first = support.evaluate(lambda q, k, v: kernel(q, k, v, return_lse=True), *arrays)
    for _ in range(20):
        again = kernel.backward(*arrays[:3], first.o, first.lse, arrays[3])
        assert all(torch.equal(x, y) for x, y in zip(again, first[2:], strict=True))


def test_hopper_falls_back_and_says_so(caplog):
    """head_dim 72, which nothing else here takes: the line comes once for each kernel that is made."""
    caplog.set_level(logging.INFO, "flashgen")
    kernel = flashgen.compile(72, True, dtype="float32", arch="sm_90a")
    report(fails(kernel, 72, BOUNDS["3xtf32"], LENGTHS[:2]))
    assert "float32 is multiplied by mma.sync; the sm_90 kernels run" in caplog.text


def test_float64_is_refused_before_anything_is_launched():
    q, k, v, _ = (x.double() for x in inputs(8, 8, (2, 2), 64))
    with pytest.raises(ValueError, match="float64"):
        flashgen.attention(q, k, v)
    o = flashgen.compile(64, dtype="float64", target="interpret")(q, k, v)
    assert o.dtype == torch.float64 and o.is_cuda
