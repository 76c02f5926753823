"""`mask_aux` and `score_aux`: arrays in, results as dense attention gives them, and one sentence for each refusal."""

import struct

import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import masks, scores
from flashgen.kernel import programs
from flashgen.plan.arch import parse_arch
from flashgen.runtime.arguments import Problem

torch = pytest.importorskip("torch")


@pytest.fixture
def inputs():
    return support.random_inputs(2, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")


@pytest.fixture
def aux():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (30, 2), generator=generator, dtype=torch.int32).T
    return ids, torch.randn(1, 4, 21, 30, generator=generator).expand(2, 4, 21, 30)


@pytest.fixture
def kernel():
    return flashgen.compile(16, True, dtype="float16", mask_mod=masks.document, score_mod=scores.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_arrays_of_every_type(kernel, inputs, aux, dtype):
    """Types that were not assumed make another kernel, of the same functions."""
    ids, bias = aux[0], aux[1].to(dtype)
    read = {"mask_ids": ids, "score_biases": bias}
    functions = {name: getattr(kernel.resolve((ids,), (bias,))[0].spec, name) for name in ("causal", "mask", "score")}

    def attend(q, k, v):
        return kernel(q, k, v, return_lse=True, mask_aux=(ids,), score_aux=(bias,))

    assert not support.failures(attend, *inputs, aux=read, **functions)


def test_types_are_assumed_until_there_are_arrays(kernel):
    assert [(item.name, item.rank, item.dtype.name) for item in kernel.spec.arrays] == [
        ("mask_ids", 2, "int32"),
        ("score_biases", 4, "float32"),
    ]
    assert str(kernel.spec) == "d16_fp16_causal_document_int_bias_float"
    assert "Array<int, 2> mask_ids;" in kernel.source["attention_forward"]
    assert "args.mask_ids.at(batch, " in kernel.source["attention_backward"]


def test_attention_takes_them_too(kernel, inputs, aux):
    q, k, v, _ = inputs
    given = {"mask_aux": [aux[0]], "score_aux": [aux[1]]}
    found = flashgen.attention(q, k, v, True, mask_mod=masks.document, score_mod=scores.bias, **given)
    assert torch.equal(found, kernel(q, k, v, **given))


def test_numpy_arrays(kernel, inputs, aux):
    q, k, v, _ = inputs
    ids, bias = aux
    found = kernel(*(x.numpy() for x in (q, k, v)), mask_aux=(ids.numpy(),), score_aux=(bias.numpy(),))
    np.testing.assert_array_equal(found, kernel(q, k, v, mask_aux=(ids,), score_aux=(bias,)).numpy())


def test_slopes_as_alibi_has_them_are_alibi(inputs):
    q, k, v, _ = inputs
    slopes = torch.exp2(-8.0 * torch.arange(1, 5) / 4)
    found = flashgen.attention(q, k, v, score_mod=scores.slopes, score_aux=(slopes,))
    torch.testing.assert_close(found, flashgen.attention(q, k, v, score_mod=scores.alibi), atol=2e-3, rtol=2e-3)


def test_a_mask_has_no_gradient(inputs):
    """Under no_grad nobody asks for that of a parameter."""
    ends, (q, k, v, _) = torch.nn.Parameter(torch.tensor([11.0, 30.0])), inputs
    kernel = flashgen.compile(16, dtype="float16", mask_mod=lambda b, h, q_idx, kv_idx, ends: kv_idx < ends[b])
    refused(kernel, q, k, v, mask_aux=(ends,), mentions=["mask_aux's ends", "requires grad", "detach"])
    with torch.no_grad():
        assert kernel(q, k, v, mask_aux=(ends,)).shape == (2, 21, 4, 16)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda ids, bias: (None, (bias,)), ["mask_aux has 0", "takes 1 (ids)"]),
        (lambda ids, bias: ((ids, ids), (bias,)), ["mask_aux has 2", "takes 1 (ids)"]),
        (lambda ids, bias: (ids, (bias,)), ["mask_aux is of type Tensor", "tuple"]),
        (lambda ids, bias: (([0, 1],), (bias,)), ["mask_aux[0] is of type list"]),
        (lambda ids, bias: ((ids.long(),), (bias,)), ["mask_aux[0] is int64", "int32"]),
        (lambda ids, bias: ((ids,), (bias.double(),)), ["score_aux[0] is float64", "float32"]),
        (lambda ids, bias: ((ids[0],), (bias,)), ["mask_aux's ids has 1 dimensions", "indexed by 2"]),
        (lambda ids, bias: ((ids.numpy(),), (bias,)), ["mask_aux's ids is not of torch as q is"]),
        (lambda ids, bias: ((ids,), (bias[:, :0],)), ["score_aux's biases has shape (2, 0, 21, 30)"]),
    ],
)
def test_what_is_refused(kernel, inputs, aux, change, mentions):
    q, k, v, _ = inputs
    mask_aux, score_aux = change(*aux)
    refused(kernel, q, k, v, mask_aux=mask_aux, score_aux=score_aux, mentions=mentions)


def test_arrays_for_no_function_are_refused(inputs, aux):
    q, k, v, _ = inputs
    refused(flashgen.attention, q, k, v, mask_aux=(aux[0],), mentions=["mask_aux has 1", "takes none"])
    refused(flashgen.compile(16, dtype="float16"), q, k, v, score_aux=(aux[1],), mentions=["score_aux has 1"])


def test_more_batches_than_one_launch_has_are_refused_where_they_are_told_apart():
    q = k = v = torch.zeros(65536, 1, 1, 16, dtype=torch.float16)
    ids = torch.zeros(65536, 1, dtype=torch.int32)
    options = {"mask_mod": masks.document, "mask_aux": (ids,)}
    refused(flashgen.attention, q, k, v, **options, mentions=["batch = 65536", "split"])


def test_a_function_that_has_changed_is_refused(inputs):
    """The kernel for other types is traced when they come: it must be that of the same function."""
    sizes = [1.0]
    kernel = flashgen.compile(16, dtype="float16", score_mod=lambda s, b, h, q, k, table: s + table[h] * sizes[0])
    q, k, v, _ = inputs
    kernel(q, k, v, score_aux=(torch.ones(4),))
    sizes[0] = 2.0
    refused(kernel, q, k, v, score_aux=(torch.ones(4).half(),), mentions="changed since it was compiled")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_a_kernel_is_told_of_arrays(kernel, arch):
    """Behind the other arrays, in the order of the call: an address, strides, and the last index of each axis."""
    (program,) = programs("forward", kernel.spec, parse_arch(arch))
    assert program.tensors == ["q", "k", "v", "o", "lse", "mask_ids", "score_biases"]
    strides = dict.fromkeys("qkvo", (512, 64, 16)) | {"lse": (84, 21)}
    strides |= {"mask_ids": (1, 2, 1, 29), "score_biases": (0, 630, 30, 1, 1, 3, 20, 29)}
    problem = Problem(2, 4, 2, 21, 30, 16, 16, ())
    bound = program.bind(strides, problem.scalars(1.0) | {"multiprocessors": 4, "zero": 0})
    ids, biases = (bound.offsets[program.tensors.index(name)] for name in ("mask_ids", "score_biases"))
    assert struct.unpack_from("<5q", bound.template, ids) == (0, 1, 2, 1, 29)
    assert struct.unpack_from("<9q", bound.template, biases) == (0, 0, 630, 30, 1, 1, 3, 20, 29)
    assert bound.batch_bytes[5:] == [0, 0]


def test_what_leaves_no_tile_room_on_hopper_takes_the_portable_kernels():
    kernel = flashgen.compile(256, score_mod=scores.bias, arch="sm_90a")
    assert kernel.plan["attention_forward"].arch.name == "sm_90"
