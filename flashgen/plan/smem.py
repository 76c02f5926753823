"""The byte map of shared memory: buffers that are never alive together share space (greedy colouring by offset)."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.ir.graph import interference
from flashgen.ir.nodes import Buffer, Kernel, Space
from flashgen.plan.plan import Placement

ALIGNMENT = 16


def row_bytes(cols: int, element: int) -> int:
    """Bytes from row to row of a shared tile.

    ldmatrix reads eight rows of 16 bytes at once; with an odd number of 16-byte pieces in a row those eight lie in
    different banks, and every address is base + constant, with no swizzle to compute.
    """
    pieces = cols * element // 16
    return (pieces + 1 - pieces % 2) * 16


def stage_bytes(buffer: Buffer, sizes: Mapping[str, int]) -> int:
    """Bytes of one stage of a shared buffer: a padded tile, or a vector."""
    if len(buffer.shape) == 1:
        return sizes[buffer.shape[0]] * buffer.dtype.bytes
    rows, cols = (sizes[dim] for dim in buffer.shape)
    return rows * row_bytes(cols, buffer.dtype.bytes)


def allocate(kernel: Kernel, sizes: Mapping[str, int], stages: Mapping[str, int]) -> tuple[Placement, ...]:
    """Offsets for the kernel's shared buffers, the largest placed first, each at the lowest free offset."""
    graph = interference(kernel, Space.SHARED)
    buffers = [kernel.buffer(name) for name in graph.nodes]
    footprint = {item.name: stage_bytes(item, sizes) * stages.get(item.name, 1) for item in buffers}
    placed: dict[str, Placement] = {}
    for item in sorted(buffers, key=lambda item: (-footprint[item.name], item.name)):
        taken = sorted((placed[name].offset, placed[name].end) for name in graph[item.name] if name in placed)
        offset = _lowest_gap(taken, footprint[item.name])
        width = row_bytes(sizes[item.shape[1]], item.dtype.bytes) if len(item.shape) == 2 else item.dtype.bytes
        placed[item.name] = Placement(item.name, offset, stage_bytes(item, sizes), stages.get(item.name, 1), width)
    return tuple(sorted(placed.values(), key=lambda place: (place.offset, place.buffer)))


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    """The least offset at which `size` bytes touch none of the taken ranges."""
    offset = 0
    for start, end in taken:
        if offset + size <= start:
            break
        offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
    return offset
