"""Tensor maps: how TMA is told the address, sizes and strides of an array (CUDA Driver API, cuTensorMapEncodeTiled)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flashgen.runtime.bindings import libcuda

MAP_BYTES = 128
ALIGNMENT = 64  # of the structure that the driver writes
KEPT = 64  # encoded addresses of one array
TYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_...
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZERO = 0, 3, 3, 0


@dataclass
class TensorMap:
    """The map of one array but for its address.

    sizes: (columns, rows, heads, batches). strides: of rows, heads and batches, in elements of 16 bits.
    box: (columns, rows, heads) of one copy.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, int, int]
    _known: dict[int, bytes] = field(default_factory=dict)

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
        sizes = (ctypes.c_uint64 * 4)(*(max(size, 1) for size in self.sizes))
        # The stride of a dimension of one element is never used, but has to be a multiple of 16 bytes.
        steps = [2 * stride if size > 1 else 16 for stride, size in zip(self.strides, self.sizes[1:], strict=True)]
        strides = (ctypes.c_uint64 * 3)(*steps)
        box = (ctypes.c_uint32 * 4)(*self.box, 1)
        ones = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
        return sizes, strides, box, ones, NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZERO

    def _encode(self, address: int) -> bytes:
        storage = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT)
        aligned = -(-ctypes.addressof(storage) // ALIGNMENT) * ALIGNMENT
        failed = libcuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(aligned), TYPES[self.dtype], 4, ctypes.c_void_p(address), *self._described
        )
        if failed:
            raise RuntimeError(f"the driver refuses a tensor map (error {failed}) for {self}")
        return ctypes.string_at(aligned, MAP_BYTES)
