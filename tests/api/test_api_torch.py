"""Torch tensors on the CPU, with autograd, through the interpreter, by the correctness rule of the GPU suite."""

import pytest

torch = pytest.importorskip("torch")

import support  # noqa: E402

import flashgen  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16]


def inputs(dtype, seqlen_q=45, seqlen_k=77, heads_q=4, heads_kv=2, head_dim=16, head_dim_v=None, batch=2, seed=0):
    dims = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v)
    return support.random_inputs(*dims, dtype=dtype, device="cpu", seed=seed)


def attend(kernel, **options):
    return lambda q, k, v: kernel(q, k, v, return_lse=True, **options)


def report(found):
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(1, 1), (45, 77), (77, 45), (130, 140), (90, 1)])
def test_forward_and_backward(lengths, heads, causal, dtype):
    kernel = flashgen.compile(16, causal, dtype=dtype)
    report(support.failures(attend(kernel), *inputs(dtype, *lengths, *heads), causal=causal))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (40, 24), (24, 40), (192, 128), (256, 256)])
def test_head_dims(head_dim, head_dim_v):
    kernel = flashgen.compile(head_dim, True, head_dim_v=head_dim_v)
    arrays = inputs(torch.bfloat16, 40, 50, head_dim=head_dim, head_dim_v=head_dim_v)
    report(support.failures(attend(kernel), *arrays, causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
def test_lengths_of_zero(batch, seqlen_q, seqlen_k, causal):
    kernel = flashgen.compile(16, causal)
    report(support.failures(attend(kernel), *inputs(torch.bfloat16, seqlen_q, seqlen_k, batch=batch), causal=causal))


@pytest.mark.parametrize("lengths", [(45, 77), (77, 45)])
def test_gradient_through_the_lse(lengths):
    kernel = flashgen.compile(16, True)
    dlse = torch.randn(2, 4, lengths[0])
    report(support.failures(attend(kernel), *inputs(torch.bfloat16, *lengths), causal=True, dlse=dlse))


def test_gradient_of_the_lse_alone():
    q, k, v, do = inputs(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flashgen.compile(16, True)(*leaves, return_lse=True)
    dlse = torch.randn_like(lse)
    gradients = torch.autograd.grad(lse, leaves, dlse, materialize_grads=True)
    result = support.Result(o.detach(), lse.detach(), *gradients)
    q, k, v = (x.detach() for x in leaves)
    report(support.judge(result, q, k, v, torch.zeros_like(do), causal=True, dlse=dlse))


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scale(scale):
    kernel = flashgen.compile(16, True)
    report(support.failures(attend(kernel, scale=scale), *inputs(torch.bfloat16), causal=True, scale=scale))


def test_bhsd():
    kernel = flashgen.compile(16, True, layout="bhsd")

    def bshd(q, k, v):
        o, lse = kernel(*(x.transpose(1, 2) for x in (q, k, v)), return_lse=True)
        assert o.shape == (2, 4, 45, 16)
        return o.transpose(1, 2), lse

    report(support.failures(bshd, *inputs(torch.bfloat16), causal=True))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_one_liner(layout):
    def one_line(q, k, v):
        turned = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
        o, lse = flashgen.attention(*turned, causal=True, layout=layout, return_lse=True)
        return (o.transpose(1, 2) if layout == "bhsd" else o), lse

    report(support.failures(one_line, *inputs(torch.float16, head_dim=24, head_dim_v=40), causal=True))


def test_strides_and_slices_of_a_packed_tensor():
    torch.manual_seed(0)
    packed = torch.randn(2, 50, 3, 4, 16).bfloat16()
    padded = torch.randn(4, 2, 50, 4, 17).bfloat16()
    shared = torch.randn(4, 1, 50, 4, 16).bfloat16().expand(4, 2, 50, 4, 16)
    kernel = flashgen.compile(16, True)
    report(support.failures(attend(kernel), *packed.unbind(2), padded[3, ..., 1:], causal=True))
    report(support.failures(attend(kernel), *(padded[i, ..., 1:] for i in range(4)), causal=True))
    report(support.failures(attend(kernel), *(shared[i] for i in range(4)), causal=True))


def test_gradient_of_a_sum_has_stride_zero_everywhere():
    q, k, v, do = inputs(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flashgen.compile(16, True)(*leaves, return_lse=True)
    gradients = torch.autograd.grad(o.sum(), leaves)
    q, k, v = (x.detach() for x in leaves)
    result = support.Result(o.detach(), lse.detach(), *gradients)
    report(support.judge(result, q, k, v, torch.ones_like(do), causal=True))


def test_gradients_reach_a_projection():
    """Through the slices of one packed tensor back to its weight, against the same model by the dense formula."""
    torch.manual_seed(0)
    x = torch.randn(2, 30, 24).bfloat16()
    weight = torch.randn(24, 3 * 2 * 16).mul(0.2).bfloat16().requires_grad_()

    def gradient(attention):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).unbind(2)
        return torch.autograd.grad(attention(q, k, v).float().square().sum(), weight)[0].double()

    def dense(q, k, v):
        q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    want = gradient(dense)
    got = gradient(lambda q, k, v: flashgen.attention(q, k, v, causal=True))
    assert float((got - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv"])
def test_only_some_inputs_need_a_gradient(wanted):
    *arrays, do = inputs(torch.bfloat16)
    kernel = flashgen.compile(16, True)
    want = support.evaluate(attend(kernel), *arrays, do)
    for name, x in zip("qkv", arrays, strict=True):
        x.requires_grad_(name in wanted)
    kernel(*arrays).backward(do)
    for name, x in zip("qkv", arrays, strict=True):
        assert (x.grad is not None) == (name in wanted)
        assert x.grad is None or torch.equal(x.grad, getattr(want, f"d{name}"))


def test_without_gradients():
    q, k, v, _ = inputs(torch.bfloat16)
    kernel = flashgen.compile(16, True)
    plain = kernel(q, k, v)
    assert isinstance(plain, torch.Tensor) and plain.dtype == torch.bfloat16 and not plain.requires_grad
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert kernel(*leaves).requires_grad
    with torch.no_grad():
        o, lse = kernel(*leaves, return_lse=True)
    assert not o.requires_grad and not lse.requires_grad and torch.equal(o, plain)


def test_interpreting_is_deterministic():
    arrays = inputs(torch.bfloat16)
    kernel = flashgen.compile(16, True, deterministic=True)
    first, second = (support.evaluate(attend(kernel), *arrays) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    report(support.judge(first, *arrays, causal=True))


def test_target_interpret_says_the_same():
    arrays = inputs(torch.bfloat16)
    auto = support.evaluate(attend(flashgen.compile(16, True)), *arrays)
    interpreted = support.evaluate(attend(flashgen.compile(16, True, target="interpret")), *arrays)
    assert all(torch.equal(x, y) for x, y in zip(auto, interpreted, strict=True))


@pytest.mark.filterwarnings("error:Dynamo")
def test_torch_compile_leaves_the_call_out_of_its_graph():
    """It followed the call into the interpreter, and failed there."""
    kernel = flashgen.compile(16, True)
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    for call in (kernel, lambda *qkv: flashgen.attention(*qkv, causal=True)):

        def layer(x, call=call):
            return (call(2 * x, x, x) + 1).relu()

        results = []
        for made in (layer, torch.compile(layer, backend="eager")):
            out = made(x)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
