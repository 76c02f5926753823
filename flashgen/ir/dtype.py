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

    @property
    def in_memory(self) -> str:
        """The name of the type of arrays that hold it."""
        return "float32" if self.name == "tf32" else self.name


BF16 = DType("bfloat16", 2, "bf16")
F16 = DType("float16", 2, "fp16")
F32 = DType("float32", 4, "float")
I32 = DType("int32", 4, "int")
I64 = DType("int64", 8, "int64")

# float32 inputs. The type of an operand says what its products are: three of TF32, which together are as good as
# float32, or one, to which both operands are rounded.
FP32 = DType("float32", 4, "fp32")
TF32 = DType("tf32", 4, "tf32")
PRECISIONS = {"3xtf32": FP32, "tf32": TF32}

F64 = DType("float64", 8, "double")  # of the interpreter alone

OPERANDS = (BF16, F16, FP32, TF32)  # what tiles hold that take part in products
STORAGE = {dtype.name: dtype for dtype in (BF16, F16, FP32, F64)}
