"""`sinks`: arrays in, results and gradients as dense attention gives them, and one sentence for each refusal."""

import struct

import denominators
import numpy as np
import pytest
import support
from test_api_refusals import refused

import flashgen
from flashgen import masks, scores
from flashgen.kernel import programs
from flashgen.plan.arch import parse_arch
from flashgen.runtime import launch
from flashgen.runtime.arguments import Problem
from flashgen.runtime.call import Call

torch = pytest.importorskip("torch")


@pytest.fixture
def inputs():
    return support.random_inputs(2, 21, 30, 4, 2, 16, dtype=torch.float16, device="cpu")


@pytest.fixture
def sinks():
    return torch.tensor([0.3, -1.0, 2.5, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("lengths", [(21, 30), (30, 13)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (9, 3), "softcap": 2.0}], ids=["plain", "all"])
def test_gradients_are_those_of_autograd(options, lengths, dtype, sinks):
    q, k, v, do = support.random_inputs(2, *lengths, 4, 2, 16, dtype=torch.float16, device="cpu")
    kernel = flashgen.compile(16, **{"causal": False} | options, dtype="float16", sinks=True)
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}

    def attend(q, k, v, t):
        return kernel(q, k, v, sinks=t, return_lse=True)

    assert not denominators.failures(attend, q, k, v, do, sinks.to(dtype), **functions)


def test_beside_functions_that_read_arrays(inputs, sinks):
    q, k, v, do = inputs
    ids, bias = torch.arange(30).repeat(2, 1).int() // 11, torch.randn(2, 4, 21, 30)
    kernel = flashgen.compile(16, dtype="float16", mask_mod=masks.document, score_mod=scores.bias, sinks=True)

    def attend(q, k, v, t):
        return kernel(q, k, v, mask_aux=(ids,), score_aux=(bias.half(),), sinks=t, return_lse=True)

    of_types = kernel.resolve((ids,), (bias.half(),), sinks=sinks)[0].spec
    functions = {name: getattr(of_types, name) for name in ("causal", "mask", "score")}
    aux = {"mask_ids": ids, "score_biases": bias.half()}
    assert not denominators.failures(attend, q, k, v, do, sinks, aux=aux, **functions)
    assert not denominators.failures(attend, q, k, v, do, sinks.half(), aux=aux, **functions)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_numpy_and_attention(inputs, sinks, layout):
    q, k, v, _ = (x if layout == "bshd" else x.transpose(1, 2).contiguous() for x in inputs)
    kernel = flashgen.compile(16, True, dtype="float16", layout=layout, sinks=True)
    expected = kernel(q, k, v, sinks=sinks)
    assert torch.equal(flashgen.attention(q, k, v, True, layout=layout, sinks=sinks), expected)
    host = [x.numpy() for x in (q, k, v)]
    np.testing.assert_array_equal(kernel(*host, sinks=sinks.numpy()), expected.numpy())
    o, lse = kernel.forward(*host, sinks=sinks.numpy()[::-1])
    found = kernel.backward(*host, o, lse, o, sinks=sinks.numpy()[::-1])
    assert [x.shape for x in found] == [*(x.shape for x in host), (4,)]
    assert found[3].dtype == np.float32


def test_minus_infinity_is_as_without(inputs):
    q, k, v, do = inputs
    none = torch.full((4,), -torch.inf)
    kernel, plain = (flashgen.compile(16, dtype="float16", sinks=sinks) for sinks in (True, False))
    o, lse = kernel.forward(q, k, v, sinks=none)
    assert all(torch.equal(x, y) for x, y in zip((o, lse), plain.forward(q, k, v), strict=True))
    *found, dsinks = kernel.backward(q, k, v, o, lse, do, sinks=none)
    assert all(torch.equal(x, y) for x, y in zip(found, plain.backward(q, k, v, o, lse, do), strict=True))
    assert torch.equal(dsinks, torch.zeros(4))


def test_no_queries_and_no_keys(sinks):
    kernel = flashgen.compile(16, dtype="float16", sinks=True)
    for lengths in ((0, 5), (5, 0)):
        q, k, v, do = support.random_inputs(2, *lengths, 4, 2, 16, dtype=torch.float16, device="cpu")
        o, lse = kernel.forward(q, k, v, sinks=sinks)
        assert torch.equal(lse, sinks[:, None].expand(2, 4, lengths[0]))
        dsinks = kernel.backward(q, k, v, o, lse, do, torch.ones_like(lse), sinks=sinks)[3]
        assert torch.equal(dsinks, torch.full((4,), 2.0 * lengths[0]))


def test_the_type_of_the_sinks_chooses_the_kernel(sinks):
    kernel = flashgen.compile(16, sinks=True)
    assert str(kernel.spec) == "d16_bf16_causal_sinks_float"
    assert kernel.resolve(sinks=sinks)[0] is kernel
    other = kernel.resolve(sinks=sinks.bfloat16())[0]
    assert str(other.spec) == "d16_bf16_causal_sinks_bf16" and kernel.resolve(sinks=sinks.bfloat16())[0] is other


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_and_their_arguments(arch):
    kernel = flashgen.compile(64, arch=arch, sinks=True)
    assert list(kernel.ir)[-2:] == ["attention_sink_sums", "attention_dsinks"]
    *_, adds, ends = programs("backward", kernel.spec, parse_arch(arch))
    assert adds.tensors == ["lse_log2", "delta", "sink_sums", "sinks"] and ends.tensors == ["sink_sums", "dsinks"]
    sizes = {"batch": 2, "seqlen_q": 6720, "seqlen_k": 5, "heads": 4}
    more = kernel.workspace_bytes(**sizes) - flashgen.compile(64, arch=arch).workspace_bytes(**sizes)
    assert more == 4 * 4 * 2 * 6720 // 64


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        (lambda t: None, ["takes sinks", "sinks=t"]),
        (lambda t: t[:3], ["sinks has shape (3,)", "(4,)"]),
        (lambda t: t[None], ["sinks has shape (1, 4)", "(4,)"]),
        (lambda t: t.double(), ["sinks is float64", "float32 or float16"]),
        (lambda t: t.bfloat16(), ["sinks is bfloat16", "float32 or float16"]),
        (lambda t: t.numpy(), ["sinks is not of torch as q is"]),
        (lambda t: 0.5, ["sinks is of type float"]),
    ],
)
def test_what_is_refused(inputs, sinks, given, mentions):
    kernel = flashgen.compile(16, dtype="float16", sinks=True)
    refused(kernel, *inputs[:3], sinks=given(sinks), mentions=mentions)


def test_sinks_that_were_not_asked_for(inputs, sinks):
    kernel = flashgen.compile(16, dtype="float16")
    refused(kernel, *inputs[:3], sinks=sinks, mentions=["compiled without", "sinks=True"])
    for wrong in (1, None, sinks):
        refused(flashgen.compile, 16, sinks=wrong, mentions=["sinks = ", "True or False"])


def test_first_keys_beside_a_window(inputs):
    """The other kind of sink: keys that stay in sight."""
    q, k, v, _ = inputs
    place = torch.arange(21)[:, None] + 9
    keys = torch.arange(30)
    shown = (keys <= place) & ((keys >= place - 6) | (keys < 3))
    found = flashgen.attention(q, k, v, mask_mod=masks.sink_window(6, 0, first=3))
    bias = torch.where(shown, 0.0, -torch.inf).expand(2, 4, 21, 30)
    torch.testing.assert_close(found, flashgen.attention(q, k, v, score_mod=scores.bias, score_aux=(bias,)))
    near = flashgen.attention(q, k, v, causal=True, window=(6, 0))
    assert torch.equal(flashgen.attention(q, k, v, mask_mod=masks.sink_window(6, 0, first=0)), near)


def test_what_the_kernels_of_the_gradient_are_told(monkeypatch):
    """Their workspaces element by element: strides and the last index of each axis, and a grid by stretches."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 4)
    kernel = flashgen.compile(64, arch="sm_90a", sinks=True)
    made = programs("backward", kernel.spec, parse_arch("sm_90a"))
    call = Call(Problem(3, 4, 2, 300, 70, 64, 64, ()), 1.0, (3, 300, 4, 64), (3, 4, 300), 0, True)
    tiles = dict.fromkeys(("q", "k", "v", "o", "dout"), (4 * 300 * 64, 64, 256))
    *_, adds, ends = kernel._launches("backward", made, call, tiles | {"sinks": (1, 3)})
    rows = call.workspaces["delta"][2]
    assert call.workspaces["sink_sums"] == (1, 4, 15) and adds.grid == (1, 4, 1) and ends.grid == (1, 1, 1)
    lse, delta, sums, sinks = adds.offsets
    elements = (0, 4 * rows, rows, 1, 2, 3, rows - 1)
    assert struct.unpack_from("<7q", adds.template, lse) == struct.unpack_from("<7q", adds.template, delta) == elements
    assert struct.unpack_from("<3q", adds.template, sums) == (0, 60, 15)
    assert struct.unpack_from("<3q", adds.template, sinks) == (0, 1, 3)
    assert struct.unpack_from("<7q", ends.template, ends.offsets[0]) == (0, 60, 15, 1, 0, 3, 14)
