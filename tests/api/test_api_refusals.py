"""Bad input is refused with one sentence that names what is wrong, and before anything is compiled."""

import math

import numpy as np
import pytest

import flashgen


@pytest.fixture(autouse=True)
def nothing_is_compiled(tmp_path, monkeypatch):
    """Every cubin is written to the disk cache, so an empty cache shows that nothing was compiled."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    yield
    assert not list(tmp_path.rglob("*"))


def refused(call, *args, mentions, **options):
    """call(...) raises ValueError or TypeError; the message is one line and matches every pattern of `mentions`."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and 15 <= len(message) <= 300, message
    for pattern in [mentions] if isinstance(mentions, str) else mentions:
        assert pattern.lower() in message.lower(), f"{pattern!r} is not in: {message}"


def arrays(*shapes, dtype=np.float16):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def good():
    return arrays((2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16))


@pytest.fixture
def kernel():
    return flashgen.compile(16, True, dtype="float16")


def both_ways(kernel, q, k, v, *, mentions, **options):
    refused(kernel, q, k, v, mentions=mentions, **options)
    refused(flashgen.attention, q, k, v, mentions=mentions, **options)


def test_good_input_is_not_refused(kernel):
    """The other tests change one thing in this."""
    assert kernel(*good()).shape == flashgen.attention(*good()).shape == (2, 5, 4, 16)


@pytest.mark.parametrize("head_dim", [0, -8, 4, 12, 100, 257, 580, 584])
def test_head_dim(head_dim):
    refused(flashgen.compile, head_dim, True, mentions=["head_dim", str(head_dim)])
    refused(flashgen.compile, 64, True, head_dim_v=head_dim, mentions=["head_dim_v", str(head_dim)])


@pytest.mark.parametrize("head_dim", ["128", 128.0, np.float32(128), None, True, np.True_, [128]])
def test_head_dim_is_an_integer(head_dim):
    refused(flashgen.compile, head_dim, mentions=["head_dim", "multiple of 8"])
    if head_dim is not None:
        refused(flashgen.compile, 64, head_dim_v=head_dim, mentions=["head_dim_v", "multiple of 8"])


@pytest.mark.parametrize("dim", [12, 100, 584])
def test_head_dim_of_arrays(dim):
    refused(flashgen.attention, *arrays(*[(1, 4, 2, dim)] * 3), mentions=["head_dim", str(dim)])


WRONG_DTYPES = [
    "tf32",
    "int8",
    "half precision",
    "bf16",
    "fp16",
    "half",
    "",
    None,
    np.int32,
    np.dtype("f16"),
    float,
]


@pytest.mark.parametrize("dtype", WRONG_DTYPES, ids=str)
def test_dtype(dtype):
    refused(flashgen.compile, 64, dtype=dtype, mentions=["dtype = ", "'bfloat16'", "'float16'"])


def test_torch_dtype():
    torch = pytest.importorskip("torch")
    refused(flashgen.compile, 64, dtype=torch.int32, mentions=["dtype", "int32"])


@pytest.mark.parametrize("arch", ["sm_999", "sm_70", "ampere", "sm_80; rm"])
def test_arch(arch):
    refused(flashgen.compile, 64, arch=arch, mentions=["arch", "sm_80"])


def test_layout_and_target():
    refused(flashgen.compile, 64, layout="sbhd", mentions=["layout", "sbhd"])
    refused(flashgen.compile, 64, target="gpu", mentions=["target", "gpu"])
    refused(flashgen.attention, *good(), layout="sbhd", mentions=["layout", "sbhd"])


@pytest.mark.parametrize("wrong", [80, 1.5, [], {}, b"bshd", np.array([1, 2]), object], ids=repr)
@pytest.mark.parametrize("name", ["arch", "layout", "target", "dtype"])
def test_a_choice_of_another_type(name, wrong):
    """What cannot be hashed and what has no truth value too."""
    refused(flashgen.compile, 64, **{name: wrong}, mentions=[f"{name} = {wrong!r}", "use"])


def test_a_good_call_before_hides_nothing():
    """Kernels are kept by what they were asked for, and 1 == True."""
    arrays = good()
    flashgen.attention(*arrays, causal=True)
    for wrong in (1, [], None):
        refused(flashgen.attention, *arrays, causal=wrong, mentions=[f"causal = {wrong!r}", "True or False"])
    for wrong in ([], {}, b"bshd", None):
        refused(flashgen.attention, *arrays, layout=wrong, mentions=[f"layout = {wrong!r}", "use"])


def test_float32_arrays(kernel):
    refused(kernel, *(x.astype(np.float32) for x in good()), mentions=["float32", "float16"])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_mixed_dtypes(kernel, position):
    given = good()
    given[position] = given[position].astype(np.float32)
    both_ways(kernel, *given, mentions="float32")


def test_mixed_torch_dtypes():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in good())
    refused(flashgen.attention, q, k.bfloat16(), v, mentions="bfloat16")
    refused(flashgen.compile(16, dtype="bfloat16"), q, k, v, mentions=["bfloat16", "float16"])


def test_mixed_kinds_of_arrays(kernel):
    torch = pytest.importorskip("torch")
    q, k, v = good()
    both_ways(kernel, q, torch.from_numpy(k), v, mentions=["k", "one"])


@pytest.mark.parametrize("wrong", [None, 3.0, [[1.0]], "q"])
def test_not_an_array(kernel, wrong):
    _, k, v = good()
    both_ways(kernel, wrong, k, v, mentions="q")


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(3, 2), (2, 4), (4, 3)])
def test_heads_that_do_not_divide(kernel, heads_q, heads_kv):
    given = arrays((2, 5, heads_q, 16), (2, 7, heads_kv, 16), (2, 7, heads_kv, 16))
    both_ways(kernel, *given, mentions=["heads", str(heads_q), str(heads_kv)])


@pytest.mark.parametrize("size", [2**31 - 2**16 + 1, 2**31, 2**32 + 5, 2**40])
@pytest.mark.parametrize(("what", "axis", "which"), [("batch", 0, "qkv"), ("seqlen_q", 1, "q"), ("seqlen_k", 1, "kv")])
def test_more_than_32_bits_count(kernel, what, axis, which, size):
    """Views without memory of their own reach any size; the kernels number rows and batches by 32-bit integers."""
    shape = [1, 1, 1, 16]
    one = np.zeros(16, np.float16)
    long = [size if at == axis else 1 for at in range(3)]
    given = [
        np.lib.stride_tricks.as_strided(one, [*(long if name in which else shape[:3]), 16], (0, 0, 0, 2))
        for name in "qkv"
    ]
    both_ways(kernel, *given, mentions=[f"{what} = {size}", "split"])


def test_zero_heads(kernel):
    both_ways(kernel, *arrays((2, 5, 4, 16), (2, 7, 0, 16), (2, 7, 0, 16)), mentions="heads")


@pytest.mark.parametrize(
    ("shapes", "mentions"),
    [
        ([(2, 5, 4, 16), (3, 7, 2, 16), (2, 7, 2, 16)], "batch"),
        ([(2, 5, 4, 16), (2, 7, 2, 16), (3, 7, 2, 16)], "batch"),
        ([(1, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)], "batch"),
        ([(2, 5, 4, 16), (2, 7, 2, 16), (2, 8, 2, 16)], "seqlen"),
        ([(2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 4, 16)], "heads"),
        ([(2, 5, 4, 16), (2, 7, 2, 24), (2, 7, 2, 16)], "head_dim"),
        ([(5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 16)], "q"),
        ([(2, 5, 4, 16), (1, 2, 7, 2, 16), (2, 7, 2, 16)], "k"),
    ],
)
def test_shapes_that_disagree(kernel, shapes, mentions):
    both_ways(kernel, *arrays(*shapes), mentions=mentions)


def test_shapes_that_are_not_the_kernels(kernel):
    refused(kernel, *arrays(*[(2, 5, 2, 32)] * 3), mentions=["head_dim", "32", "16"])
    refused(kernel, *arrays((2, 5, 2, 16), (2, 5, 2, 16), (2, 5, 2, 32)), mentions=["v", "head_dim", "32", "16"])


@pytest.mark.parametrize("dimensions", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_other_than_four_dimensions(kernel, position, dimensions):
    given = good()
    given[position] = np.zeros((1, 2, 5, 4, 16)[5 - dimensions :], np.float16)
    both_ways(kernel, *given, mentions=[f"{'qkv'[position]} has {dimensions} dimensions", "batch", "head_dim"])


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("wrong", [None, [[1.0]], np.float16(1), np.float16], ids=repr)
def test_every_argument_is_an_array(kernel, position, wrong):
    given = good()
    given[position] = wrong
    both_ways(kernel, *given, mentions=[f"{'qkv'[position]} is ", "numpy"])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_mask_is_not_ignored(kernel, position):
    given = good()
    given[position] = np.ma.masked_array(given[position], mask=given[position] > 0)
    both_ways(kernel, *given, mentions=f"{'qkv'[position]} is of type MaskedArray")


def fake(tensor):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode().from_tensor(tensor)


def nested(layout):
    def make(tensor):
        import torch

        return torch.nested.nested_tensor(list(tensor), layout=getattr(torch, layout))

    return make


NOT_IN_MEMORY = {
    "sparse": lambda tensor: tensor.to_sparse(),
    "nested": nested("strided"),
    "jagged": nested("jagged"),
    "fake": fake,
    "meta": lambda tensor: tensor.to("meta"),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", NOT_IN_MEMORY)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_rows_in_memory(kernel, position, kind, gradient):
    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x) for x in good()]
    given[position] = NOT_IN_MEMORY[kind](given[position])
    given[(position + 1) % 3].requires_grad_(gradient)
    both_ways(kernel, *given, mentions="device meta" if kind == "meta" else f"{'qkv'[position]} ")


def test_transforms_of_torch_func(kernel):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in good())
    for call in (kernel, flashgen.attention):
        for transformed in (torch.vmap(call), torch.func.jacrev(call), torch.func.hessian(call)):
            refused(transformed, q[None], k[None], v[None], mentions="q ")
            refused(transformed, q, k, v, mentions="q ")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_forward_mode_derivative_is_not_dropped(kernel, needs_grad):
    torch = pytest.importorskip("torch")
    from torch.autograd import forward_ad

    q, k, v = (torch.from_numpy(x) for x in good())
    v.requires_grad_(needs_grad)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        both_ways(kernel, dual, k, v, mentions="forward-mode")
        assert kernel(q, k, v).shape == q.shape, "without a tangent there is nothing to refuse"


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("kind", ["every other element", "transposed", "reversed"])
def test_last_dimension_not_contiguous(kernel, position, kind):
    given = good()
    x = given[position]
    given[position] = {
        "every other element": np.repeat(x, 2, axis=-1)[..., ::2],
        "transposed": np.ascontiguousarray(x.swapaxes(1, 3)).swapaxes(1, 3),
        "reversed": x[..., ::-1],
    }[kind]
    both_ways(kernel, *given, mentions=["contiguous", "qkv"[position]])


@pytest.mark.parametrize("scale", [-1.0, -1e-30, math.nan, math.inf, -math.inf])
def test_scale(kernel, scale):
    both_ways(kernel, *good(), scale=scale, mentions="scale")


HUGE = 10**400


@pytest.mark.parametrize("scale", [HUGE, -HUGE, 1e300, 2.0**127.5, 1e-50, 5e-324, 2.0**-127], ids=lambda x: f"{x!r:.8}")
def test_a_scale_that_no_float32_holds(kernel, scale):
    """The kernels take it as float32: as 0 or as infinity it would make NaN of what the mask hides."""
    both_ways(kernel, *good(), scale=scale, mentions=["scale = "])


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, np.float64(1e-30)])
def test_a_scale_of_almost_zero_is_the_mean(kernel, scale):
    q, k, v = good()
    seen = [v[:, : 3 + i].mean(1, dtype=np.float32) for i in range(5)]
    expected = np.stack(seen, 1).repeat(2, axis=2)
    assert np.abs(kernel(q, k, v, scale=scale) - expected).max() < 2e-3


@pytest.mark.parametrize("scale", ["0.1", [0.1]])
def test_scale_is_a_number(kernel, scale):
    both_ways(kernel, *good(), scale=scale, mentions="scale")


@pytest.mark.parametrize(
    ("sizes", "mentions"),
    [
        ({"batch": -1}, ["batch = -1", "negative"]),
        ({"seqlen_q": -5}, ["seqlen_q = -5", "negative"]),
        ({"seqlen_q": 2**31}, [f"seqlen_q = {2**31}", "split"]),
        ({"seqlen_k": 2**40}, [f"seqlen_k = {2**40}", "split"]),
        ({"seqlen_k": 7.0}, ["seqlen_k = 7.0", "whole number"]),
        ({"heads": "4"}, ["heads = '4'", "whole number"]),
        ({"batch": True}, ["batch = True", "whole number"]),
        ({"batch": None}, ["batch = None", "whole number"]),
        ({"heads": 0}, ["heads of q = 0", "positive multiple"]),
        ({"heads": 3}, ["heads of q = 3", "heads of k and v = 2"]),
        ({"heads_kv": 0}, ["heads of k and v = 0", "positive multiple"]),
        ({"heads_kv": -2}, ["heads of k and v = -2", "positive multiple"]),
        ({"heads": 65536}, ["heads = 65536", "65535"]),
    ],
    ids=str,
)
def test_sizes_of_workspaces(kernel, sizes, mentions):
    good_sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "heads": 4, "heads_kv": 2}
    assert kernel.workspace_bytes(**good_sizes) > 0
    refused(kernel.workspace_bytes, **good_sizes | sizes, mentions=mentions)


def test_a_lone_element_is_contiguous(kernel):
    """Lengths of one, where strides mean nothing, are not an error."""
    q, k, v = (x[:, :1] for x in good())
    assert np.isfinite(kernel(q, k, v)).all()


def test_target_cuda_needs_a_gpu_array():
    """NumPy arrays lie on the host; a kernel that may only run on the GPU says so, and does not interpret silently."""
    refused(flashgen.compile(16, dtype="float16", target="cuda", arch="sm_80"), *good(), mentions="cuda")
