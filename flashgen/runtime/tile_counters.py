"""Counters on the device from which the blocks of a launch take their tiles.

A launch leaves its counter at zero, so that launches that follow each other on a stream share one, and no launch has to
clear it. Launches that may run at the same time need counters of their own: each stream has one, by the number that the
driver never gives twice, and each launch that is captured into a graph, since the graph may run beside anything.
"""

from __future__ import annotations

import ctypes
import threading

from flashgen.runtime.bindings import libcuda, runtime

COUNT = 16384  # in one allocation: 64 KiB
BYTES = 4
LEGACY = (0, 1)  # two handles of one stream, which all threads share
PER_THREAD = 2  # one handle of a stream for each thread; like the others up to here it is never captured


class _Counters:
    """The counters of one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.free: list[int] = []
        self.of_stream: dict[int | None, int] = {}  # by the driver's number; None for the legacy default stream

    def address(self, stream: int) -> int:
        """The counter of a launch on a stream. Raises RuntimeError where captures have used up what there is."""
        capturing = stream > PER_THREAD and runtime().streamIsCapturing(stream)
        number = None if capturing or stream in LEGACY else stream_number(stream)
        found = None if capturing else self.of_stream.get(number)
        if found is not None:
            return found
        with self.lock:
            if not capturing and len(self.free) < COUNT // 2:
                self._allocate()
            if not self.free:
                raise RuntimeError("no counter is left for a captured launch; launch once outside of a capture first")
            taken = self.free.pop()
            if not capturing:
                self.of_stream[number] = taken
            return taken

    def _allocate(self) -> None:
        """More counters, zero before anything else runs on the device: memory that is never given back."""
        address = runtime().malloc(COUNT * BYTES)
        runtime().memset(address, 0, COUNT * BYTES)
        runtime().deviceSynchronize()
        self.free += range(address, address + COUNT * BYTES, BYTES)


_known: dict[int, _Counters] = {}
_lock = threading.Lock()


def address(stream: int, device: int) -> int:
    """The address of the counter for a launch on a stream of a device, which is current."""
    known = _known.get(device)
    if known is None:
        with _lock:
            known = _known.setdefault(device, _Counters(device))
    return known.address(stream)


def stream_number(stream: int) -> int:
    """The driver's number of a stream: a handle may be that of a later stream too, and one handle is each thread's."""
    number = ctypes.c_ulonglong(0)
    failed = libcuda().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number))
    if failed:
        raise RuntimeError(f"the driver does not know stream {stream} (error {failed}); pass one that is not destroyed")
    return number.value
