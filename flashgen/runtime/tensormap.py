"""Tensor maps: how TMA is told the address, sizes and strides of an array (CUDA Driver API, cuTensorMapEncodeTiled)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashgen.runtime.bindings import libcuda

MAP_BYTES = 128
ALIGNMENT = 64  # of the structure that the driver writes
KEPT = 64  # encoded addresses of one array
LAST_ROW = 2**30  # as in templates/device/sm90.cuh
ANY_ROW = 2**31 - 2**16
Box = tuple[int, int, int]
TYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZERO = 0, 3, 3, 0


@dataclass
class TensorMap:
    """The map of one array but for its address.

    sizes: (columns, rows, heads, batches), or what `of_sequences` makes of them. strides: of all but the columns, in
    elements of 16 bits. box: (columns, rows, heads) of one copy.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: Box
    _known: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of_sequences(cls, dtype: str, sizes: tuple[int, int, int], row: int, head: int, box: Box) -> TensorMap:
        """The map of packed sequences, whose rows a copy may end anywhere.

        sizes: columns, rows and heads. row, head: the strides of these. Coordinates (column, LAST_ROW - n, head, end,
        LAST_ROW) are those of the n rows up to `end`: further ones are out of range, and LAST_ROW strides less LAST_ROW
        strides, modulo 2^64, leave the address of row end - n.
        """
        cols, rows, heads = sizes
        row = row if rows > 1 else 8  # of a single row any will do, but it has to be a multiple of 16 bytes
        back = 2**64 // LAST_ROW // 2 - row
        return cls(dtype, (cols, LAST_ROW, heads, ANY_ROW, ANY_ROW), (row, head, row, back), box)

    def at(self, address: int) -> bytes:
        """The 128 bytes for an address, kept for the next call: encoding costs the driver 9 us. Raises RuntimeError."""
        if not address:  # an array without elements, from which nothing is loaded: the driver would refuse it
            return bytes(MAP_BYTES)
        found = self._known.get(address)
        if found is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            found = self._known[address] = self._encode(address)
        return found

    @cached_property
    def _described(self) -> tuple[Any, ...]:
        """What the driver is told behind the address."""
        rank = len(self.sizes)
        sizes = (ctypes.c_uint64 * rank)(*(max(size, 1) for size in self.sizes))
        # The stride of a dimension of one element is never used, but has to be a multiple of 16 bytes.
        steps = [2 * stride if size > 1 else 16 for stride, size in zip(self.strides, self.sizes[1:], strict=True)]
        strides = (ctypes.c_uint64 * (rank - 1))(*steps)
        ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        box = (ctypes.c_uint32 * rank)(*self.box, *ones[3:])
        return sizes, strides, box, ones, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZERO

    def _encode(self, address: int) -> bytes:
        storage = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
        aligned = -(-ctypes.addressof(storage) // ALIGNMENT) * ALIGNMENT
        failed = libcuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned), TYPES[self.dtype], len(self.sizes), ctypes.c_void_p(address), *self._described
        )
        if failed:
            raise RuntimeError(f"the driver refuses a tensor map (error {failed}) for {self}")
        return ctypes.string_at(aligned, MAP_BYTES)


def through_batches(strides: Sequence[int], batches: int, rows: int) -> tuple[int, int] | None:
    """The stride of rows, and how many lie from batch to batch, where rows are counted through all batches.

    strides: of batch, head and row. rows: of one batch. None where it is no whole number, or the rows are too many.
    """
    batch, _, row = strides
    if batches <= 1:
        return row, 0
    if rows <= 1:  # whose stride says nothing
        return batch, 1
    if row <= 0 or batch % row or batches * (batch // row) > LAST_ROW:
        return None
    return row, batch // row
