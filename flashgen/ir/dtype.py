"""Element types that the IR knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """An element type: its canonical name, its size in bytes and the name that the emitted CUDA uses."""

    name: str
    bytes: int
    cuda: str

    def __str__(self) -> str:
        return self.name


BF16 = DType("bfloat16", 2, "bf16")
F16 = DType("float16", 2, "fp16")
F32 = DType("float32", 4, "float")
I32 = DType("int32", 4, "int")
I64 = DType("int64", 8, "int64")

STORAGE = {dtype.name: dtype for dtype in (BF16, F16)}
