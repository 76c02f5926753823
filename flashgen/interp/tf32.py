"""TF32, in which the tensor cores multiply float32: the exponent of float32, 10 bits of its fraction."""

from __future__ import annotations

import numpy as np

from flashgen.ir.dtype import FP32, TF32, DType

KEPT = np.uint32(0xFFFFE000)  # the bits of a float32 that TF32 has
HALF = np.uint32(0x1000)


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest TF32, ties away from zero, still as float32 (PTX ISA, "cvt.rna.tf32")."""
    x = np.ascontiguousarray(x, np.float32)
    bits = (x.view(np.uint32) + HALF) & KEPT
    return np.where(np.isfinite(x), bits.view(np.float32), x)


def cut(x: np.ndarray) -> np.ndarray:
    """float32 values without what TF32 lacks of their fraction: what a matrix instruction makes of any operand."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & KEPT).view(np.float32)


def operand(dtype: DType, x: np.ndarray) -> np.ndarray:
    """What a product takes of an operand of that type; products of FP32 are those of float32."""
    return rounded(x) if dtype == TF32 else x


def matmul(dtype: DType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b as the matrix instructions have it for operands of a type: of FP32 by three products of their TF32 parts."""
    if dtype != FP32:
        return np.matmul(operand(dtype, a), operand(dtype, b))
    a_high, b_high = cut(a), cut(b)
    a_low, b_low = cut(a - a_high), cut(b - b_high)
    return np.matmul(a_low, b_high) + np.matmul(a_high, b_low) + np.matmul(a_high, b_high)
