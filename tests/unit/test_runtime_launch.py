"""The launcher against a made-up driver: what it loads, what it passes, which device it is on, and what it costs."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from flashgen.runtime import bindings, launch

CUBIN = SimpleNamespace(name="fwd", arch="sm_80", image=b"image")


class FakeGpu:
    """The parts of CuPy that the launcher uses, for two devices; each thread has its current context."""

    def __init__(self):
        self.thread = threading.local()
        self.loads, self.attributes, self.launches = [], [], []
        self.refuse = None

    # the driver
    def ctxGetDevice(self):
        device = getattr(self.thread, "device", None)
        if device is None:
            raise RuntimeError("CUDA_ERROR_INVALID_CONTEXT")
        return device

    def funcSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))

    def launchKernel(self, function, x, y, z, bx, by, bz, shared, stream, params, extra):
        if self.refuse:
            raise RuntimeError(self.refuse)
        assert (by, bz, extra) == (1, 1, 0)
        pointer = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))[0]
        args = ctypes.string_at(pointer, 8)
        self.launches.append((self.ctxGetDevice(), function, (x, y, z), bx, shared, stream, args))

    # the runtime
    def getDevice(self):
        return getattr(self.thread, "device", None) or 0

    def setDevice(self, device):
        if device > 1:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        self.thread.device = device

    def free(self, pointer):
        assert pointer == 0

    # modules
    def Module(self):
        if self.refuse:
            raise RuntimeError(self.refuse)
        load = lambda image: self.loads.append((self.ctxGetDevice(), image))  # noqa: E731
        return SimpleNamespace(load=load, get_function=lambda name: SimpleNamespace(ptr=100 + self.ctxGetDevice()))


@pytest.fixture
def gpu(monkeypatch):
    fake = FakeGpu()
    for name in ("driver", "runtime", "modules"):
        monkeypatch.setattr(launch, name, lambda: fake)
    return fake


def test_a_launch_passes_everything_on(gpu):
    launcher = launch.Launcher(CUBIN, threads=128, shared_bytes=1024)
    assert gpu.loads == []
    gpu.setDevice(0)
    launcher((3, 2, 1), b"argument", 77)
    launcher((4, 2, 1), b"ARGUMENT")
    assert gpu.loads == [(0, b"image")] and gpu.attributes == []
    assert gpu.launches == [
        (0, 100, (3, 2, 1), 128, 1024, 77, b"argument"),
        (0, 100, (4, 2, 1), 128, 1024, 0, b"ARGUMENT"),
    ]


@pytest.mark.parametrize(
    ("shared", "asks"), [(0, False), (48 * 1024, False), (48 * 1024 + 1, True), (227 * 1024, True)]
)
def test_much_shared_memory_is_asked_for_once(gpu, shared, asks):
    launcher = launch.Launcher(CUBIN, 128, shared)
    gpu.setDevice(0)
    for _ in range(3):
        launcher((1, 1, 1), b"argument")
    assert gpu.attributes == ([(100, 8, shared)] if asks else [])


def test_each_device_has_its_module_and_the_current_one_comes_back(gpu):
    launcher = launch.Launcher(CUBIN, 128, 0)
    gpu.setDevice(0)
    launcher((1, 1, 1), b"argument", device=1)
    launcher((1, 1, 1), b"argument", device=0)
    launcher((1, 1, 1), b"argument")
    assert [row[:2] for row in gpu.launches] == [(1, 101), (0, 100), (0, 100)]
    assert gpu.loads == [(1, b"image"), (0, b"image")] and gpu.ctxGetDevice() == 0


@pytest.mark.parametrize(("device", "used"), [(None, 0), (0, 0), (1, 1)])
def test_a_thread_without_a_context_gets_one(gpu, device, used):
    launch.Launcher(CUBIN, 128, 0)((1, 1, 1), b"argument", device=device)
    assert gpu.launches[0][0] == used and gpu.ctxGetDevice() == used


def test_many_threads_load_once_and_keep_their_arguments(gpu):
    launcher = launch.Launcher(CUBIN, 128, 0)

    def work(i):
        gpu.setDevice(0)
        launcher((1 + i, 1, 1), b"args%4d" % i)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(500)))
    assert gpu.loads == [(0, b"image")]
    assert sorted((row[2][0], row[-1]) for row in gpu.launches) == [(1 + i, b"args%4d" % i) for i in range(500)]


def test_a_failed_launch_says_what_and_why(gpu):
    launcher = launch.Launcher(CUBIN, 256, 70000)
    gpu.setDevice(0)
    launcher.load(0)
    gpu.refuse = "CUDA_ERROR_INVALID_VALUE: invalid argument"
    with pytest.raises(launch.LaunchError) as caught:
        launcher((0, 5, 6), b"argument")
    for part in ("fwd", "sm_80", "256", "70000", "0 x 5 x 6", "CUDA_ERROR_INVALID_VALUE: invalid argument"):
        assert part in str(caught.value)


def test_a_cubin_that_does_not_load_says_so(gpu):
    gpu.refuse = "CUDA_ERROR_NO_BINARY_FOR_GPU"
    with pytest.raises(launch.LaunchError, match=r"fwd.*does not load on device 1: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launch.Launcher(CUBIN, 256, 0)((1, 1, 1), b"argument", device=1)
    with pytest.raises(launch.LaunchError, match=r"device 7 cannot be used: .*invalid device ordinal"):
        launch.Launcher(CUBIN, 256, 0)((1, 1, 1), b"argument", device=7)


@pytest.mark.parametrize(("threads", "shared"), [(0, 0), (1025, 0), (128, -1)])
def test_impossible_numbers_are_refused(threads, shared):
    with pytest.raises(ValueError, match="block"):
        launch.Launcher(CUBIN, threads, shared)


def test_asking_for_a_gpu_never_raises(monkeypatch):
    assert launch.gpu_available() in (True, False)

    asked = []

    def missing(name):
        asked.append(name)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    caches = (bindings.libcuda, launch._device_count)
    for cached in caches:
        cached.cache_clear()
    assert launch.gpu_available() is False and asked
    for cached in caches:
        cached.cache_clear()


def test_a_launch_costs_under_5_microseconds_of_python(gpu, monkeypatch):
    launcher = launch.Launcher(CUBIN, 128, 0)
    gpu.setDevice(0)
    launcher.load(0)
    driver = SimpleNamespace(ctxGetDevice=lambda: 0, launchKernel=lambda *_: None)
    monkeypatch.setattr(launch, "driver", lambda: driver)
    best, args = float("inf"), bytes(200)
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            launcher((1, 2, 3), args, 0, 0)
        best = min(best, (time.perf_counter() - start) / 1000)
    print(f"{best * 1e6:.2f} us a launch")
    assert best < 5e-6
