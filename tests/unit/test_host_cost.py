"""What a repeated call does on the host, with a made-up driver; counted in calls of functions, as clocks vary."""

import ctypes
import struct
import sys
from types import SimpleNamespace

import pytest

import flashgen
from flashgen import masks
from flashgen.kernel import Kernel
from flashgen.plan.arch import parse_arch
from flashgen.runtime import launch, program, tensormap, tile_counters
from flashgen.runtime.arrays import LIBRARIES

torch = pytest.importorskip("torch")

IDS = torch.zeros(1, 64, dtype=torch.int32)
RUNTIME = SimpleNamespace(
    malloc=lambda size: 2**20,
    memset=lambda *_: None,
    deviceSynchronize=lambda: None,
    deviceGetAttribute=lambda attribute, device: {16: 132, 75: 9, 76: 0}[attribute],
)


def encode(target, kind, rank, address, *_):
    """A map that begins with its address."""
    ctypes.memmove(target.value, address.value.to_bytes(8, "little"), 8)
    return 0


@pytest.fixture
def launched(monkeypatch):
    """CPU tensors count as those of a GPU; the arguments of each launch."""
    seen = []
    driver = SimpleNamespace(ctxGetDevice=lambda: 0)
    cuda = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(tensormap, "libcuda", lambda: cuda)
    for module in (launch, tile_counters):
        monkeypatch.setattr(module, "runtime", lambda: RUNTIME)
    monkeypatch.setattr(tile_counters, "_known", {})
    launcher = SimpleNamespace(launch_here=lambda grid, args, stream, device: seen.append(args))
    monkeypatch.setattr(program.Program, "launcher", launcher)
    torch_library = type(LIBRARIES["torch"])
    monkeypatch.setattr(torch_library, "device", lambda self, array: 0)
    monkeypatch.setattr(torch_library, "stream", lambda self, device: 0)
    for cached in (launch.compute_capability, launch.multiprocessors):
        cached.cache_clear()
    yield seen
    for cached in (launch.compute_capability, launch.multiprocessors):
        cached.cache_clear()


@pytest.fixture
def same_results(monkeypatch):
    """Results of a shape lie where those of the last call did: at other addresses a call would be packed again."""
    kept = {}

    def empty(self, shape, like, float32=False):
        dtype = torch.float32 if float32 else like.dtype
        return kept.setdefault((shape, dtype), torch.empty(shape, dtype=dtype))

    monkeypatch.setattr(type(LIBRARIES["torch"]), "empty", empty)


def calls_of(action):
    """The Python functions that an action calls, in order."""
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        action()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the action


def test_a_repeated_call_of_a_kernel_takes_few_calls(launched, same_results):
    q, k, v = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3))
    kernel = Kernel(flashgen.compile(64, True, arch="sm_90a").spec, parse_arch("sm_90a"), "bshd", "auto", False)
    with torch.no_grad():
        *_, names = (calls_of(lambda: kernel(q, k, v)) for _ in range(3))
    assert len(launched) == 3 and names.count("signature") == 3
    assert len(names) <= 28, names


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({}, 56, id="plain"),
        pytest.param({"window": (100, 0)}, 60, id="window"),
        pytest.param({"softcap": 30.0}, 58, id="softcap"),
        pytest.param({"mask_mod": masks.document, "mask_aux": (IDS,)}, 76, id="document"),
    ],
)
def test_a_repeated_call_of_attention_traces_nothing_and_takes_few_calls(launched, same_results, options, most):
    q, k, v = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3))
    with torch.no_grad():
        *_, names = (calls_of(lambda: flashgen.attention(q, k, v, True, **options)) for _ in range(3))
    assert len(launched) == 3 and not {"_traced", "compile", "document", "replace"} & set(names)
    assert len(names) <= most, names


def test_other_addresses_are_packed_again_and_other_shapes_are_checked_again(launched):
    kernel = Kernel(flashgen.compile(64, True, arch="sm_90a").spec, parse_arch("sm_90a"), "bshd", "auto", False)
    q, k, v = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3))
    wider = torch.randn(1, 64, 4, 64).bfloat16()
    for changed in (q, torch.randn(1, 64, 2, 64).bfloat16(), wider[:, :, ::2], wider[:, :, 1::2], q):
        o, lse = kernel(changed, k, v, return_lse=True)
        found = [array.data_ptr().to_bytes(8, "little") in launched[-1] for array in (changed, k, v, o, lse)]
        assert all(found)
    with pytest.raises(ValueError, match="k and v disagree in seqlen_k"):
        kernel(q, k[:, :32], v)
    with pytest.raises(ValueError, match="q is float32"):
        kernel(q.float(), k, v)
    with pytest.raises(TypeError, match="k is not of torch as q is"):
        kernel(q, k.float().numpy(), v)


def test_what_kernels_of_gradients_of_arrays_are_told(launched):
    """Behind the three of the backward one for each array: its result's address, gapless strides and last indices."""
    q, k, v, do = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(4))
    kernel = flashgen.compile(64, bias=True, alibi=True)
    given = {"bias": torch.randn(2, 64, 64), "alibi_slopes": torch.rand(2)}
    o, lse = kernel.forward(q, k, v, **given)
    launched.clear()
    *_, found = kernel.backward(q, k, v, o, lse, do, **given, aux_grads=("bias", "alibi_slopes"))
    assert len(launched) == 5
    target = found["bias"].data_ptr(), 8192, 4096, 64, 1, 0, 1, 63, 63
    assert struct.pack("<9q", *target) in launched[3]
    assert all(array.data_ptr().to_bytes(8, "little") in args for array in (q, k, v, do) for args in launched[3:])
    assert found["alibi_slopes"].shape == (2,)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sinks_and_dropout_reach_every_launch(launched, arch):
    """Each kernel that draws is told the seed of its call; each that reads sinks, where they are."""
    spec = flashgen.compile(64, arch=arch, sinks=True, dropout=True).spec
    kernel = Kernel(spec, parse_arch(arch), "bshd", "auto", False)
    kernel._arch_for = lambda device: parse_arch(arch)
    q, k, v = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3))
    sinks = torch.randn(2)
    for seed in (0x123456789ABCDEF0, 0x0FEDCBA987654321):
        given = {"sinks": sinks, "dropout_p": 0.5, "dropout_seed": seed}
        o, lse = kernel.forward(q, k, v, **given)
        gradients = kernel.backward(q, k, v, o, lse, torch.randn(1, 64, 2, 64).bfloat16(), **given)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, sinks.shape]
        word = seed.to_bytes(8, "little")
        assert [word in args for args in launched[-6:]] == [True, False, True, False, False, False]
        place = sinks.data_ptr().to_bytes(8, "little")
        assert [place in args for args in launched[-6:]] == [True, False, False, False, True, False]
    launched.clear()
    kernel.forward(q, k, v, sinks=sinks, dropout_p=0.0)
    assert len(launched) == 1 and word not in launched[0]
