"""Kernel.backward by hand: what it is given besides q, k and v is checked as they are, or copied where it has gaps."""

import operator
import types

import numpy as np
import pytest

import flashgen
from flashgen.kernel import Kernel
from flashgen.runtime import interpret, launch
from flashgen.runtime.arguments import row_strides
from flashgen.runtime.arrays import LIBRARIES

GIVEN = ("o", "dout", "lse", "dlse")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(params=["bshd", "bhsd"])
def kernel(request):
    return flashgen.compile(16, True, head_dim_v=24, dtype="float16", layout=request.param)


def arguments(kernel, library="numpy"):
    """The arguments of a backward by name: 2 batches, 5 queries, 7 keys, 4 heads over 2."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 24), "dout": (2, 5, 4, 24)}
    made = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    if kernel.layout == "bhsd":
        made = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in made.items()}
    made["o"], made["lse"] = kernel.forward(made["q"], made["k"], made["v"])
    made["dlse"] = rng.standard_normal((2, 4, 5)).astype(np.float32)
    if library == "torch":
        torch = pytest.importorskip("torch")
        made = {name: torch.from_numpy(x) for name, x in made.items()}
    return made


def refused(kernel, given, name, *mentions):
    """One sentence that begins with the argument, before the interpreter or a compiler has begun."""
    with pytest.raises((ValueError, TypeError)) as caught:
        kernel.backward(**given)
    message = str(caught.value)
    assert "\n" not in message and 15 <= len(message) <= 300 and message.startswith(f"{name} "), message
    for word in mentions:
        assert word in message, message


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """How often a backward came as far as the interpreter."""
    begun = []
    run = interpret.backward
    monkeypatch.setattr(interpret, "backward", lambda *args: (begun.append(args), run(*args)))
    return begun


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_good_arguments_are_not_refused(kernel, library, runs):
    """The other tests change one thing in these."""
    given = arguments(kernel, library)
    for changes in ({}, {"dlse": None}):
        gradients = kernel.backward(**(given | changes))
        assert [x.shape for x in gradients] == [given[name].shape for name in "qkv"]
    assert len(runs) == 2


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", GIVEN)
def test_shapes(kernel, name, library, runs):
    given = arguments(kernel, library)
    x = given[name]
    for wrong in (
        x[:1],
        x[:, :1],
        x[:, :, :1],
        x[..., :1],
        x[None],
        x[0],
        x[0].reshape(-1),
        x.reshape(-1)[0:1].reshape(()),
    ):
        refused(kernel, given | {name: wrong}, name, str(tuple(wrong.shape)), str(tuple(x.shape)))
    if name in ("o", "dout"):
        other = {"o": given["q"], "dout": x.swapaxes(1, 2)}[name]
        refused(kernel, given | {name: other}, name, str(tuple(other.shape)))
    assert not runs


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
@pytest.mark.parametrize("name", GIVEN)
def test_dtypes(kernel, name, dtype, runs):
    given = arguments(kernel)
    taken = str(given[name].dtype)
    if dtype == taken:
        return
    refused(kernel, given | {name: given[name].astype(dtype)}, name, dtype, taken, "cast")
    torch = pytest.importorskip("torch")
    given = arguments(kernel, "torch")
    refused(kernel, given | {name: given[name].to(getattr(torch, dtype))}, name, dtype, taken, "cast")
    refused(kernel, given | {name: given[name].bfloat16()}, name, "bfloat16", taken, "cast")
    assert not runs


@pytest.mark.parametrize("name", GIVEN)
def test_another_library(kernel, name, runs):
    given, others = arguments(kernel), arguments(kernel, "torch")
    refused(kernel, given | {name: others[name]}, name, "library")
    refused(kernel, others | {name: given[name]}, name, "library")
    assert not runs


@pytest.mark.parametrize("name", ["k", "v", *GIVEN])
@pytest.mark.parametrize("wrong", [None, 1.0, [[1.0]], np.float32(1)], ids=repr)
def test_not_an_array(kernel, name, wrong, runs):
    if name == "dlse" and wrong is None:
        return
    refused(kernel, arguments(kernel) | {name: wrong}, name, type(wrong).__name__, "NumPy")
    assert not runs


@pytest.mark.parametrize("name", ["k", "v", *GIVEN])
def test_another_device(kernel, name, monkeypatch, runs):
    """By a library that believes one array to lie on a GPU: none is needed to refuse it."""
    given = arguments(kernel)
    monkeypatch.setattr(type(LIBRARIES["numpy"]), "device", lambda self, x: 1 if x is given[name] else None)
    refused(kernel, given, name, "device")
    assert not runs


def test_a_meta_tensor_is_refused(kernel):
    pytest.importorskip("torch")
    given = arguments(kernel, "torch")
    for name in GIVEN:
        with pytest.raises(ValueError, match="device meta is not supported"):
            kernel.backward(**(given | {name: given[name].to("meta")}))


def spread(x):
    """The same numbers in every other element of an array that is NaN elsewhere."""
    wide = np.full((*x.shape, 2), np.nan, x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def padded(x):
    """The same numbers in rows one element further apart."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 1), np.nan, x.dtype)
    wide[..., :-1] = x
    return wide[..., :-1]


LAYOUTS = {
    "spread": spread,
    "padded": padded,
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "turned": lambda x: np.ascontiguousarray(x.swapaxes(0, 2)).swapaxes(0, 2),
    "first axis last": lambda x: np.ascontiguousarray(np.moveaxis(x, 0, -1)).transpose(-1, *range(x.ndim - 1)),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("name", GIVEN)
def test_any_strides(kernel, name, how, library):
    plain = arguments(kernel)
    want = kernel.backward(**plain)
    given = plain | {name: LAYOUTS[how](plain[name])}
    if library == "torch":
        torch = pytest.importorskip("torch")
        if any(stride < 0 for stride in given[name].strides):
            return
        given = {key: torch.from_numpy(x) for key, x in given.items()}
    got = kernel.backward(**given)
    assert all(np.array_equal(np.asarray(x), y) for x, y in zip(got, want, strict=True))


class Recorder:
    """Stands for a compiled program: keeps what it is bound to and launched with."""

    def __init__(self, name, tensors):
        self.tensors = tensors
        self.arguments = operator.itemgetter(*tensors)
        self.stages = types.SimpleNamespace(plan=types.SimpleNamespace(sizes={"block_q": 16, "head_dim": 16}))
        self.name = name
        self.buffers = ()

    def bind(self, strides, scalars):
        self.strides = strides
        return self

    @property
    def program(self):
        return self

    def launch(self, pointers, stream, device, drop=None):
        self.pointers = dict(zip(self.tensors, pointers, strict=True))


@pytest.fixture
def fake_gpu(kernel, monkeypatch):
    """NumPy arrays pass for arrays of GPU 0; gives the recorders of the last backward, and its spec."""
    numpy = type(LIBRARIES["numpy"])
    monkeypatch.setattr(numpy, "device", lambda self, x: 0)
    monkeypatch.setattr(numpy, "stream", lambda self, device: 0)
    monkeypatch.setattr(launch, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 108)
    kernel = Kernel(kernel.spec, kernel.arch, kernel.layout, "auto", False)
    last = types.SimpleNamespace(kernel=kernel)

    def programs(stage, spec, arch):
        last.spec = spec
        last.made = tuple(Recorder(name, ("q", "k", "v", "o", "dout", "lse", "dlse")) for name in ("delta", "main"))
        return last.made

    kernel.programs = programs
    return last


def aligned_copy(x, shift=0):
    """A copy whose first element lies `shift` bytes after a multiple of 16."""
    room = np.zeros(x.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + shift
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.parametrize("how", [None, *LAYOUTS])
@pytest.mark.parametrize("name", GIVEN)
def test_what_a_gpu_is_launched_with(kernel, fake_gpu, name, how):
    """In place where rows and vectors are whole and aligned; else from a copy, and with the strides of that."""
    given = {key: aligned_copy(x) for key, x in arguments(flashgen.compile(**options(kernel))).items()}
    contiguous = given[name]
    given[name] = contiguous if how is None else LAYOUTS[how](contiguous)
    fake_gpu.kernel.backward(**given)
    for made in fake_gpu.made:
        in_place = made.pointers[name] == given[name].ctypes.data
        assert in_place == (how is None or (how == "turned" and name in ("o", "dout")))
        used = given[name] if in_place else contiguous
        strides = tuple(stride // used.itemsize for stride in used.strides)
        want = row_strides(strides, kernel.layout) if used.ndim == 4 else strides[:2]
        assert made.strides[name] == want
        assert all(made.pointers[key] == given[key].ctypes.data for key in given if key != name)


@pytest.mark.parametrize("name", ["q", "k", "v", *GIVEN])
def test_only_tiles_have_to_be_aligned(kernel, fake_gpu, name):
    given = {key: aligned_copy(x) for key, x in arguments(flashgen.compile(**options(kernel))).items()}
    fake_gpu.kernel.backward(**given)
    assert fake_gpu.spec.aligned
    fake_gpu.kernel.backward(**(given | {name: aligned_copy(given[name], shift=4)}))
    assert fake_gpu.spec.aligned == (name in ("lse", "dlse"))


def options(kernel):
    """A kernel like this one that is interpreted wherever its arrays are."""
    spec = kernel.spec
    dims = {"head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v}
    return dims | {"dtype": "float16", "causal": spec.causal, "layout": kernel.layout, "target": "interpret"}
