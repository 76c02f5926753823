"""A cubin on the GPU: loading it once a device, and launching it for as little host time as Python allows.

A kernel takes one argument, a struct passed by value as bytes. The launch goes straight to the driver
(`cuLaunchKernel` through CuPy's binding), with a pointer to those bytes and no copy on this side.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashgen.runtime.bindings import driver, libcuda, modules, runtime

if TYPE_CHECKING:
    from flashgen.runtime.compile import Cubin

MAX_BLOCKS = 65535  # along y and z of a grid; along x it is 2^31 - 1
SHARED_WITHOUT_ASKING = 48 * 1024  # bytes of dynamic shared memory that need no attribute on the function
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76  # cudaDevAttrMultiProcessorCount, ...ComputeCapabilityMajor, ...Minor


class LaunchError(RuntimeError):
    """A kernel that the driver refuses to load or to launch."""


class _Slot(threading.local):
    """The array of pointers to arguments that `cuLaunchKernel` reads: here one pointer, and one array a thread."""

    def __init__(self) -> None:
        pointers = (ctypes.c_char_p * 1)()  # assigning bytes stores their address and keeps them alive
        self.pair = pointers, ctypes.addressof(pointers)


_slot = _Slot()


class Launcher:
    """One compiled kernel, ready to launch on every device of the process and from any thread.

    cubin: what to launch. threads: a block. shared_bytes: dynamic shared memory a block.
    Making one touches no GPU; the module is loaded at the first launch on a device, or by `load`.
    Raises ValueError for numbers that no chip takes.
    """

    def __init__(self, cubin: Cubin, threads: int, shared_bytes: int) -> None:
        if not 1 <= threads <= 1024:
            raise ValueError(f"threads is {threads}, and a block has 1 to 1024 of them; choose another number of warps")
        if shared_bytes < 0:
            raise ValueError(f"shared_bytes is {shared_bytes}, and no block has fewer than 0; pass the plan's number")
        self.cubin = cubin
        self.threads = threads
        self.shared_bytes = shared_bytes
        self._functions: dict[int, int] = {}  # device -> CUfunction
        self._modules: list[Any] = []  # alive as long as this object
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Launcher({self.cubin.name}, {self.cubin.arch}, threads={self.threads}, shared={self.shared_bytes})"

    def __call__(self, grid: tuple[int, int, int], args: bytes, stream: int = 0, device: int | None = None) -> None:
        """Queues one launch and returns.

        grid: blocks along x, y and z, each at least 1. args: the kernel's one argument, exactly as long as the struct
        that the kernel declares (the driver cannot check it), at most 4096 bytes, copied before this returns.
        stream: the CUstream as an integer, of the same device. device: where to launch, made current for the call;
        None means the current device.

        Raises LaunchError if the driver refuses the module or the launch, and ImportError without CuPy. What goes
        wrong while the kernel runs shows at the next synchronisation.
        """
        here = context_device()
        if here is None or (device is not None and device != here):
            with current(device) as now:
                self.launch_here(grid, args, stream, now)
        else:
            self.launch_here(grid, args, stream, here)

    def load(self, device: int) -> int:
        """The CUfunction on `device`, which is current; loads the module the first time. Raises LaunchError."""
        with self._lock:
            if device in self._functions:
                return self._functions[device]
            try:
                module = modules().Module()
                module.load(self.cubin.image)
                function = module.get_function(self.cubin.name).ptr
                if self.shared_bytes > SHARED_WITHOUT_ASKING:
                    driver().funcSetAttribute(function, MAX_DYNAMIC_SHARED, self.shared_bytes)
            except RuntimeError as error:
                message = f"{self!r} does not load on device {device}: {error}; compile it for that device's arch"
                raise LaunchError(message) from None
            self._modules.append(module)
            self._functions[device] = function
            return function

    def launch_here(self, grid: tuple[int, int, int], args: bytes, stream: int, device: int) -> None:
        """Launches on `device`, which is current: the caller has asked already."""
        function = self._functions.get(device) or self.load(device)
        pointers, address = _slot.pair
        pointers[0] = args
        x, y, z = grid
        try:
            driver().launchKernel(function, x, y, z, self.threads, 1, 1, self.shared_bytes, stream, address, 0)
        except (RuntimeError, OverflowError) as error:
            raise LaunchError(f"{self!r} did not launch on a grid of {x} x {y} x {z} blocks: {error}") from None


@contextmanager
def current(device: int | None) -> Iterator[int]:
    """A device that is not current yet, or in a thread without a context: current inside, and then what was before.

    None means the current device. Raises LaunchError where it cannot be used.
    """
    here = context_device()
    try:
        device = current_device() if device is None else device
        runtime().setDevice(device)
        runtime().free(0)  # makes the primary context current, whatever the version of the runtime
    except RuntimeError as error:
        which = "the current device" if device is None else f"device {device}"
        raise LaunchError(f"{which} cannot be used: {error}") from None
    try:
        yield device
    finally:
        if here is not None:
            runtime().setDevice(here)


def gpu_available() -> bool:
    """Whether the CUDA driver is there and shows at least one GPU. Never raises, and does not import CuPy."""
    return _device_count() > 0


def current_device() -> int:
    """The number of this thread's current device. Raises RuntimeError without a driver, ImportError without CuPy."""
    return runtime().getDevice()


@functools.cache
def compute_capability(device: int) -> tuple[int, int]:
    """The major and minor compute capability of a device, such as (9, 0). Raises RuntimeError if there is no such."""
    attribute = runtime().deviceGetAttribute
    return attribute(MAJOR, device), attribute(MINOR, device)


@functools.cache
def multiprocessors(device: int) -> int:
    """The number of streaming multiprocessors of a device. Raises RuntimeError if there is no such device."""
    return runtime().deviceGetAttribute(MULTIPROCESSORS, device)


@functools.cache
def _device_count() -> int:
    """GPUs that the driver shows to this process, asked of the driver itself: CuPy takes half a second to import."""
    try:
        cuda = libcuda()
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def context_device() -> int | None:
    """The device of the context that is current in this thread; None if there is none."""
    try:
        return driver().ctxGetDevice()
    except RuntimeError:
        return None
