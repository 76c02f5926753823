"""Arrays of torch, CuPy and NumPy behind one small interface. Nothing is imported here that the caller has not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """One array library: what flashgen needs from it. So written it is NumPy; the others differ from that."""

    name: str

    def module(self) -> Any:
        return sys.modules[self.name]

    def device(self, array: Any) -> int | None:
        """The CUDA device's number, or None on the host."""
        return None

    def signature(self, array: Any) -> tuple:
        """All that a call depends on but the address, hashable. Raises RuntimeError for a tensor without memory."""
        aligned = self.pointer(array) % 16 == 0
        return array.shape, array.strides, array.dtype, self.device(array), aligned

    def strides(self, array: Any) -> Shape:
        """Strides in elements."""
        return tuple(stride // array.itemsize for stride in array.strides)

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        return array.ctypes.data

    def pointers(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        """Addresses of several arrays."""
        return tuple([self.pointer(array) for array in arrays])

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype)

    def empty(self, shape: Shape, like: Any, float32: bool = False) -> Any:
        """An uninitialised array on the device of another, of its type or of float32."""
        module = self.module()
        return module.empty(shape, dtype=module.float32 if float32 else like.dtype)

    def zeros(self, shape: Shape, like: Any, dtype: Any = None) -> Any:
        """An array of zeros on the device of another, float32 where its type, which is one of the library, is None."""
        module = self.module()
        return module.zeros(shape, dtype=module.float32 if dtype is None else dtype)

    def arange(self, count: int, like: Any) -> Any:
        """0, 1, 2 ... as 64-bit integers, on the device of another array."""
        return self.module().arange(count)

    def int32(self, array: Any) -> Any:
        return array.astype(self.module().int32)

    def at_most(self, array: Any, limit: int) -> Any:
        return self.module().minimum(array, limit)

    def sorted(self, array: Any) -> Any:
        """In ascending order along the last axis."""
        return self.module().sort(array, -1)

    def contiguous(self, array: Any) -> Any:
        return self.module().ascontiguousarray(array)

    def cast(self, array: Any, like: Any) -> Any:
        """The array in the type of another, itself where that is its own."""
        return array.astype(like.dtype, copy=False)

    def stream(self, device: int) -> int:
        """The library's current CUDA stream on a device."""
        raise NotImplementedError("NumPy has no streams")

    def to_numpy(self, array: Any, dtype: str = "float32") -> Any:
        """A NumPy copy on the host, of a type that NumPy has."""
        import numpy as np

        return np.ascontiguousarray(array, dtype=dtype)

    def from_numpy(self, array: Any, like: Any, float32: bool = False) -> Any:
        """A float32 NumPy array as one of this library, on the device and of the type of another."""
        module = self.module()
        return module.asarray(array).astype(module.float32 if float32 else like.dtype)


class _Cupy(Library):
    def device(self, array: Any) -> int | None:
        return array.device.id

    def pointer(self, array: Any) -> int:
        return array.data.ptr

    def stream(self, device: int) -> int:
        return self.module().cuda.get_current_stream().ptr

    def to_numpy(self, array: Any, dtype: str = "float32") -> Any:
        return super().to_numpy(array.get(), dtype)


class _Torch(Library):
    def device(self, array: Any) -> int | None:
        kind = array.device.type
        if kind not in ("cuda", "cpu"):
            raise ValueError(f"device {array.device} is not supported; use a CUDA or CPU tensor")
        return array.device.index if kind == "cuda" else None

    def signature(self, array: Any) -> tuple:  # in one go, as it is asked of each tensor of each call
        return array.shape, array.stride(), array.dtype, array.device, array.data_ptr() % 16 == 0

    def strides(self, array: Any) -> Shape:
        return array.stride()

    def pointer(self, array: Any) -> int:
        return array.data_ptr()

    def pointers(self, arrays: Iterable[Any]) -> tuple[int, ...]:
        return tuple([array.data_ptr() for array in arrays])  # a call less for each

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def empty(self, shape: Shape, like: Any, float32: bool = False) -> Any:
        return like.new_empty(shape, dtype=self.module().float32) if float32 else like.new_empty(shape)

    def zeros(self, shape: Shape, like: Any, dtype: Any = None) -> Any:
        return like.new_zeros(shape, dtype=self.module().float32 if dtype is None else dtype)

    def arange(self, count: int, like: Any) -> Any:
        return self.module().arange(count, device=like.device)

    def int32(self, array: Any) -> Any:
        return array.int()

    def at_most(self, array: Any, limit: int) -> Any:
        return array.clamp(max=limit)

    def sorted(self, array: Any) -> Any:
        return array.sort(-1).values

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def cast(self, array: Any, like: Any) -> Any:
        return array.to(like.dtype)

    def stream(self, device: int) -> int:
        return self.module()._C._cuda_getCurrentRawStream(device)

    def to_numpy(self, array: Any, dtype: str = "float32") -> Any:
        return array.detach().to("cpu", getattr(self.module(), dtype)).numpy()

    def from_numpy(self, array: Any, like: Any, float32: bool = False) -> Any:
        module = self.module()
        return module.from_numpy(array).to(like.device, module.float32 if float32 else like.dtype)


LIBRARIES = {"torch": _Torch("torch"), "cupy": _Cupy("cupy"), "numpy": Library("numpy")}


def library_of(array: Any, name: str = "q") -> Library:
    """The library that an array belongs to; TypeError, with the name of the argument, for anything else."""
    library = _library_of_type(type(array))  # type: ignore[arg-type]
    if library is None:
        kind = type(array).__name__
        raise TypeError(f"{name} is of type {kind}; give a torch tensor, a CuPy or a NumPy array like q, k and v")
    return library


def is_array(array: Any) -> bool:
    """True for what `library_of` knows."""
    return _library_of_type(type(array)) is not None  # type: ignore[arg-type]


@cache
def _library_of_type(kind: type) -> Library | None:
    """By the module of a base; scalars and other classes of these libraries are no arrays."""
    if hasattr(kind, "shape") and hasattr(kind, "__setitem__") and not _is_more_than_memory(kind):
        for base in kind.__mro__:
            library = LIBRARIES.get(base.__module__.partition(".")[0])
            if library is not None:
                return library
    return None


def _is_more_than_memory(kind: type) -> bool:
    """True for a masked array, whose mask a kernel would not see, and for a tensor that only its class can read.

    Such tensors (fake, jagged, sharded) answer operations by themselves; their address is that of nothing or of a part.
    """
    if any(base.__module__.split(".")[:2] == ["numpy", "ma"] for base in kind.__mro__):
        return True
    own = [vars(base)["__torch_dispatch__"] for base in kind.__mro__ if "__torch_dispatch__" in vars(base)]
    return len(own) > 1  # that of torch.Tensor is the last
