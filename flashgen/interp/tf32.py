"""TF32, in which the tensor cores multiply float32: the exponent of float32, 10 bits of its fraction."""

from __future__ import annotations

import numpy as np

from flashgen.ir.dtype import FP32, TF32, DType

DROPPED = 13  # bits of a float32's fraction that TF32 lacks


def rounded(x: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest TF32, ties away from zero, still as float32 (PTX ISA, "cvt.rna.tf32")."""
    x = np.ascontiguousarray(x, np.float32)
    bits = (x.view(np.uint32) + np.uint32(1 << (DROPPED - 1))) & np.uint32(-(1 << DROPPED) & 0xFFFFFFFF)
    return np.where(np.isfinite(x), bits.view(np.float32), x)


def operand(dtype: DType, x: np.ndarray) -> np.ndarray:
    """What a product takes of an operand of that type; products of FP32 are those of float32."""
    return rounded(x) if dtype == TF32 else x


def matmul(dtype: DType, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b as the matrix instructions have it for operands of a type: of FP32 by three products of TF32."""
    if dtype != FP32:
        return np.matmul(operand(dtype, a), operand(dtype, b))
    a_high, b_high = rounded(a), rounded(b)
    a_low, b_low = rounded(a - a_high), rounded(b - b_high)
    return np.matmul(a_low, b_high) + np.matmul(a_high, b_low) + np.matmul(a_high, b_high)
