"""Arrays of torch, CuPy and NumPy behind one small interface. Nothing is imported here that the caller has not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

Shape = tuple[int, ...]


class View(NamedTuple):
    """A (batch, heads, seqlen, head_dim) view of an array: address, shape, strides in elements, address alignment."""

    pointer: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True)
class Library:
    """One array library: what flashgen needs from it."""

    name: str

    def module(self) -> Any:
        return sys.modules[self.name]

    def device(self, array: Any) -> int | None:
        """The CUDA device's number, or None on the host."""
        if self.name == "torch":
            kind = array.device.type
            if kind not in ("cuda", "cpu"):
                raise ValueError(f"device {array.device} is not supported; use a CUDA or CPU tensor")
            return array.device.index if kind == "cuda" else None
        return array.device.id if self.name == "cupy" else None

    def place(self, array: Any) -> Any:
        """Something hashable that differs where devices do, for keys: `device` takes four times as long with torch."""
        return array.device if self.name == "torch" else self.device(array)

    def strides(self, array: Any) -> Shape:
        """Strides in elements."""
        if self.name == "torch":
            return array.stride()
        return tuple(stride // array.itemsize for stride in array.strides)

    def pointer(self, array: Any) -> int:
        """Address of the first element."""
        if self.name == "torch":
            return array.data_ptr()
        return array.data.ptr if self.name == "cupy" else array.ctypes.data

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def empty(self, shape: Shape, like: Any, float32: bool = False) -> Any:
        """An uninitialised array on the device of another, of its type or of float32."""
        if self.name == "torch":
            return like.new_empty(shape, dtype=self.module().float32) if float32 else like.new_empty(shape)
        module = self.module()
        return module.empty(shape, dtype=module.float32 if float32 else like.dtype)

    def zeros(self, shape: Shape, like: Any) -> Any:
        """A float32 array of zeros on the device of another."""
        module = self.module()
        if self.name == "torch":
            return like.new_zeros(shape, dtype=module.float32)
        return module.zeros(shape, dtype=module.float32)

    def contiguous(self, array: Any) -> Any:
        return array.contiguous() if self.name == "torch" else self.module().ascontiguousarray(array)

    def stream(self, device: int) -> int:
        """The library's current CUDA stream on a device."""
        if self.name == "torch":
            return self.module()._C._cuda_getCurrentRawStream(device)
        return self.module().cuda.get_current_stream().ptr

    def to_numpy(self, array: Any) -> Any:
        """A float32 NumPy copy on the host."""
        import numpy as np

        if self.name == "torch":
            return array.detach().to("cpu", self.module().float32).numpy()
        host = array.get() if self.name == "cupy" else array
        return np.ascontiguousarray(host, dtype=np.float32)

    def from_numpy(self, array: Any, like: Any, float32: bool = False) -> Any:
        """A float32 NumPy array as one of this library, on the device and of the type of another."""
        module = self.module()
        dtype = module.float32 if float32 else like.dtype
        if self.name == "torch":
            return module.from_numpy(array).to(like.device, dtype)
        return module.asarray(array).astype(dtype)


LIBRARIES = {name: Library(name) for name in ("torch", "cupy", "numpy")}


def library_of(array: Any, name: str = "q") -> Library:
    """The library that an array belongs to; TypeError, with the name of the argument, for anything else."""
    library = _library_of_type(type(array))  # type: ignore[arg-type]
    if library is None:
        kind = type(array).__name__
        raise TypeError(f"{name} is of type {kind}; give a torch tensor, a CuPy or a NumPy array like q, k and v")
    return library


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
