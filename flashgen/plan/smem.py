"""The byte map of shared memory: buffers that are never alive together share space (greedy colouring by offset)."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.ir.graph import interference
from flashgen.ir.nodes import Buffer, Kernel, Space
from flashgen.plan.plan import Placement

ALIGNMENT = 16
SWIZZLE_ALIGNMENT = 1024  # the swizzle takes bits 7 to 9 of the address for the row


def row_bytes(cols: int, element: int) -> int:
    """Bytes from row to row of a shared tile.

    ldmatrix reads eight rows of 16 bytes at once; with an odd number of 16-byte pieces in a row those eight lie in
    different banks, and every address is base + constant, with no swizzle to compute.
    """
    pieces = cols * element // 16
    return (pieces + 1 - pieces % 2) * 16


def panel_bytes(cols: int) -> int:
    """Bytes of one row in all panels of a swizzled tile: 128 in each, for 64 elements of 16 bits."""
    return -(-cols // 64) * 128


def allocate(kernel: Kernel, sizes: Mapping[str, int], stages: Mapping[str, int]) -> tuple[Placement, ...]:
    """Offsets for the kernel's shared buffers, the largest placed first, each at the lowest free offset."""
    graph = interference(kernel, Space.SHARED)
    buffers = [kernel.buffer(name) for name in graph.nodes]

    def width(item: Buffer) -> int:
        if len(item.shape) == 1:
            return item.dtype.bytes
        return row_bytes(sizes[item.shape[1]], item.dtype.bytes)

    stage = {item.name: sizes[item.shape[0]] * width(item) for item in buffers}
    footprint = {item.name: stage[item.name] * stages.get(item.name, 1) for item in buffers}
    placed: dict[str, Placement] = {}
    for item in sorted(buffers, key=lambda item: (-footprint[item.name], item.name)):
        taken = sorted((placed[name].offset, placed[name].end) for name in graph[item.name] if name in placed)
        offset = _lowest_gap(taken, footprint[item.name])
        count = stages.get(item.name, 1)
        placed[item.name] = Placement(item.name, offset, stage[item.name], count, width(item))
    return tuple(sorted(placed.values(), key=lambda place: (place.offset, place.buffer)))


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The least offset at which `size` bytes touch none of the taken ranges."""
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
    return offset
