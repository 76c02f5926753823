"""Inputs that are not plain contiguous tensors, head dims that differ, layouts, scales, and gradients of every kind."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import Spec, attend, inputs, report  # noqa: E402

SPECS = [Spec(64, causal=True), Spec(40, dtype="float16"), Spec(128, causal=True, dtype="float16")]
BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_KV = 2, 113, 203, 4, 2


def normal(*shape):
    return torch.randn(*shape, device="cuda")


# Each makes a (batch, seqlen, heads, dim) tensor whose last dimension alone is contiguous.
STRIDED = {
    "bhsd storage": lambda b, s, h, d: normal(b, h, s, d).transpose(1, 2),
    "sbhd storage": lambda b, s, h, d: normal(s, b, h, d).transpose(0, 1),
    "rows padded by 8": lambda b, s, h, d: normal(b, s, h, d + 8)[..., :d],
    "rows of odd stride": lambda b, s, h, d: normal(b, s, h, d + 1)[..., :d],
    "positions of odd stride": lambda b, s, h, d: normal(b, s, h * d + 1)[..., : h * d].unflatten(-1, (h, d)),
    "offset of one element": lambda b, s, h, d: normal(b * s * h * d + 1)[1:].view(b, s, h, d),
    "offset of four elements": lambda b, s, h, d: normal(b * s * h * d + 4)[4:].view(b, s, h, d),
    "every other position": lambda b, s, h, d: normal(b, 2 * s, h, d)[:, ::2],
    "batch stride 0": lambda b, s, h, d: normal(1, s, h, d).expand(b, s, h, d),
    "head stride 0": lambda b, s, h, d: normal(b, s, 1, d).expand(b, s, h, d),
    "position stride 0": lambda b, s, h, d: normal(b, 1, h, d).expand(b, s, h, d),
}


def cast(x, dtype):
    """x in dtype with the same strides, offset and sharing (`to` would make an expanded tensor dense)."""
    storage = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(dtype)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def strided_inputs(make, spec):
    dtype = getattr(torch, spec.dtype)
    dv = spec.head_dim_v or spec.head_dim
    shapes = [
        (BATCH, SEQLEN_Q, HEADS_Q, spec.head_dim),
        (BATCH, SEQLEN_K, HEADS_KV, spec.head_dim),
        (BATCH, SEQLEN_K, HEADS_KV, dv),
        (BATCH, SEQLEN_Q, HEADS_Q, dv),
    ]
    torch.manual_seed(0)
    return [cast(make(*shape), dtype) for shape in shapes]


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_strided(kernel, spec, name):
    """All four arrays at once, then each alone among contiguous ones: the addresses must not be confused."""
    strided = strided_inputs(STRIDED[name], spec)
    plain = [x.contiguous() for x in strided]
    found = support.failures(attend(kernel), *strided, causal=spec.causal)
    for i, which in enumerate(["q", "k", "v", "do"]):
        mixed = [*plain[:i], strided[i], *plain[i + 1 :]]
        found += [f"only {which}: {s}" for s in support.failures(attend(kernel), *mixed, causal=spec.causal)]
    report(found)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("packed_by", ["groups", "heads"])
def test_slices_of_a_packed_tensor(kernel, spec, packed_by):
    """q, k and v as a projection makes them, in one tensor: side by side as groups of heads, or within each head."""
    b, s, h, d, dtype = 2, 150, 3, spec.head_dim, getattr(torch, spec.dtype)
    torch.manual_seed(0)
    if packed_by == "groups":
        q, k, v = normal(b, s, 3, h, d).to(dtype).unbind(2)
    else:
        q, k, v = normal(b, s, h, 3 * d).to(dtype).split(d, dim=-1)
    report(support.failures(attend(kernel), q, k, v, normal(b, s, h, d).to(dtype), causal=spec.causal))


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_gradient_of_a_packed_tensor(kernel, spec):
    """Autograd through the slices: the gradient of the packed tensor is the three gradients side by side."""
    torch.manual_seed(0)
    packed = normal(2, 130, 8 * 64).bfloat16().requires_grad_()
    q, k, v = packed.unflatten(-1, (8, 64)).split([4, 2, 2], dim=2)
    do = normal(2, 130, 4, 64).bfloat16()
    (gradient,) = torch.autograd.grad(kernel(q, k, v), packed, do)
    parts = gradient.unflatten(-1, (8, 64)).split([4, 2, 2], dim=2)
    with torch.no_grad():
        o, lse = kernel(q, k, v, return_lse=True)
    report(support.judge(support.Result(o, lse, *parts), q.detach(), k.detach(), v.detach(), do, causal=True))


@pytest.mark.parametrize(
    "spec",
    [
        Spec(d, causal, head_dim_v=dv, dtype=dtype)
        for d, dv in ((192, 128), (64, 128), (40, 24), (128, 64), (256, 16), (16, 256))
        for causal, dtype in ((True, "bfloat16"), (False, "float16"))
    ],
    ids=str,
)
def test_head_dim_v_differs(kernel, spec):
    found = []
    for lengths in ((64, 128), (113, 203), (300, 77)):
        arrays = inputs(spec, 2, *lengths, 4, 2)
        found += [f"{lengths} {s}" for s in support.failures(attend(kernel), *arrays, causal=spec.causal)]
    report(found)


@pytest.mark.parametrize(
    "spec", [Spec(64, causal=True, layout="bhsd"), Spec(40, layout="bhsd", dtype="float16")], ids=str
)
def test_bhsd(kernel, spec):
    def bshd(q, k, v):
        o, lse = kernel(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True)
        assert o.shape == (2, 4, 113, spec.head_dim)
        return o.transpose(1, 2), lse

    storage = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(spec, 2, 113, 203, 4, 2)]
    report(support.failures(bshd, *storage, causal=spec.causal))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128)], ids=str)
def test_the_one_liner(compiled, spec, layout):
    import flashgen

    def one_line(q, k, v):
        turn = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
        o, lse = flashgen.attention(turn(q), turn(k), turn(v), causal=spec.causal, layout=layout, return_lse=True)
        return turn(o), lse

    report(support.failures(one_line, *inputs(spec, 2, 113, 203, 4, 2), causal=spec.causal))


@pytest.mark.parametrize("scale", [1.0, 0.01, 1e-4])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(96, dtype="float16")], ids=str)
def test_scale(kernel, spec, scale):
    arrays = inputs(spec, 2, 130, 203, 4, 2)
    report(support.failures(attend(kernel, scale=scale), *arrays, causal=spec.causal, scale=scale))


@pytest.mark.parametrize("lengths", [(113, 203), (203, 113), (256, 256)])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128, dtype="float16")], ids=str)
def test_gradient_through_the_lse(kernel, spec, lengths):
    arrays = inputs(spec, 2, *lengths, 4, 2)
    dlse = normal(2, 4, lengths[0])
    found = support.failures(attend(kernel), *arrays, causal=spec.causal, dlse=dlse)
    strided = normal(2, lengths[0], 4).transpose(1, 2)
    found += support.failures(attend(kernel), *arrays, causal=spec.causal, dlse=strided)
    report(found)


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_gradient_of_the_lse_alone(kernel, spec):
    q, k, v, do = inputs(spec, 2, 113, 203, 4, 2)
    dlse = normal(2, 4, 113)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = kernel(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse, leaves, dlse, materialize_grads=True)
    result = support.Result(o.detach(), lse.detach(), dq, dk, dv)
    q, k, v = (x.detach() for x in leaves)
    report(support.judge(result, q, k, v, torch.zeros_like(do), causal=True, dlse=dlse))


@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(40, dtype="float16")], ids=str)
def test_gradient_of_a_sum_has_stride_zero_everywhere(kernel, spec):
    q, k, v, do = inputs(spec, 2, 113, 203, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = kernel(*leaves, return_lse=True)
    gradients = torch.autograd.grad(o.sum(), leaves)
    q, k, v = (x.detach() for x in leaves)
    result = support.Result(o.detach(), lse.detach(), *gradients)
    report(support.judge(result, q, k, v, torch.ones_like(do), causal=spec.causal))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("spec", [Spec(64, causal=True, deterministic=True)], ids=str)
def test_only_some_inputs_need_a_gradient(kernel, spec, wanted):
    *arrays, do = inputs(spec, 2, 113, 203, 4, 2)
    want = support.evaluate(attend(kernel), *arrays, do)
    for name, x in zip("qkv", arrays, strict=True):
        x.requires_grad_(name in wanted)
    kernel(*arrays).backward(do)
    for name, x in zip("qkv", arrays, strict=True):
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, getattr(want, f"d{name}"))


@pytest.mark.parametrize("spec", [Spec(64, causal=True, deterministic=True)], ids=str)
def test_backward_twice_through_one_graph(kernel, spec):
    """The saved tensors and workspaces must survive the first backward."""
    q, k, v, do = inputs(spec, 2, 113, 203, 4, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = kernel(*leaves)
    first = torch.autograd.grad(o, leaves, do, retain_graph=True)
    second = torch.autograd.grad(o, leaves, do)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_without_gradients(kernel, spec):
    q, k, v, _ = inputs(spec, 2, 113, 203, 4, 2)
    plain = kernel(q, k, v)
    assert isinstance(plain, torch.Tensor) and not plain.requires_grad
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        without, lse = kernel(*leaves, return_lse=True)
    assert not without.requires_grad and not lse.requires_grad
    assert kernel(*leaves).requires_grad
    assert torch.equal(without, plain) and torch.equal(kernel(*leaves), plain)
    with torch.inference_mode():
        assert torch.equal(kernel(q, k, v), plain)


@pytest.mark.parametrize("spec", [Spec(64)], ids=str)
def test_mixed_devices_are_refused(kernel, spec):
    q, k, v, _ = inputs(spec, 1, 16, 16, 2, 2)
    with pytest.raises((ValueError, TypeError), match=r"(?i)device|cpu|cuda"):
        kernel(q, k.cpu(), v)
