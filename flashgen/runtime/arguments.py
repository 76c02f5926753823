"""What the arrays of a call must be: checked before anything is compiled, with one sentence for each refusal."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from flashgen.ir.dtype import F64
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.launch import MAX_BLOCKS
from flashgen.spec import Spec

LOG2_E = math.log2(math.e)
# Where scale * log2(e) is a float32 too, and neither is subnormal: a scale of 0 makes NaN of a masked score.
SCALES = (2.0**-126, 2.0**127)
MAX_SIZE = 2**31 - 2**16  # of a batch and of sequences: rows up to the end of the last block have 32-bit numbers
VECTORS = ("lse", "dlse")  # float32 (batch, heads, seqlen_q)
RESULTS = ("o", "dout", *VECTORS)  # what the backward is given besides the forward's inputs


@dataclass(frozen=True)
class Problem:
    """One call's sizes, checked. Strides are (batch, head, row), in elements."""

    batch: int
    heads: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    strides: tuple[tuple[int, int, int], ...]

    def padded_rows(self, block_q: int) -> int:
        """Rows of a workspace with room for whole blocks of queries."""
        return -(-self.seqlen_q // block_q) * block_q

    def summed_rows(self, block_q: int) -> int:
        """Rows of a vector through which the sums of sinks go; block_q: to which workspaces are padded."""
        return self.seqlen_q

    def scalars(self, scale: float) -> dict[str, int | float]:
        return {
            "batches": self.batch,
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "group": self.heads // self.heads_kv,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "length_k": self.seqlen_k,
            "scale": scale,
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "scale_log2": scale * LOG2_E,
        }


def check(spec: Spec, layout: str, library: Library, q: Any, k: Any, v: Any) -> Problem:
    """The sizes of a call, or a ValueError that names the argument, the limit and what to do."""
    for name, array in zip("qkv", (q, k, v), strict=True):
        check_dimensions(name, array)
        check_elements(name, array, spec, library, q)
    check_widths(spec, q, k, v)
    seq, head = (1, 2) if layout == "bshd" else (2, 1)
    check_agreement(k, v, {"batch": 0, "seqlen_k": seq, "heads_kv": head})
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k disagree in batch: {q.shape[0]} and {k.shape[0]}; give both the same")
    heads, heads_kv = q.shape[head], k.shape[head]
    check_sizes(q.shape[0], q.shape[seq], k.shape[seq], heads, heads_kv)
    strides = tuple(row_strides(library.strides(array), layout) for array in (q, k, v))
    check_reach(strides)
    sizes = (q.shape[0], heads, heads_kv, q.shape[seq], k.shape[seq], spec.head_dim, spec.head_dim_v)
    return Problem(*sizes, strides)


def values_of(spec: Spec, k: Any, v: Any) -> Any:
    """v, or with shared_kv, where it is left out, the columns of k that it is."""
    if not spec.shared_kv:
        if v is None:
            instead = "give a torch, CuPy or NumPy array, or compile with shared_kv=True where it is part of k"
            raise TypeError(f"v is missing; {instead}")
        return v
    if v is not None:
        raise ValueError(f"v is given, but with shared_kv it is k[..., :{spec.head_dim_v}]; leave it out")
    library_of(k, "k")
    try:
        return k[..., : spec.head_dim_v] if len(k.shape) else k
    except (RuntimeError, NotImplementedError):  # of a sparse or a nested tensor
        raise without_memory("k") from None


def check_elements(name: str, array: Any, spec: Spec, library: Library, q: Any) -> None:
    """ValueError unless the array has the kernel's type, is where q is, and has rows without gaps."""
    if library.dtype_name(array) != spec.dtype.in_memory:
        found, taken = library.dtype_name(array), spec.dtype.in_memory
        raise ValueError(f"{name} is {found} but this kernel takes {taken}; cast q, k and v to one type that it takes")
    if library.device(array) != library.device(q):
        raise ValueError(f"{name} is on another device than q; move q, k and v to one")
    if array.shape[-1] > 1 and 0 not in array.shape and library.strides(array)[-1] != 1:
        raise ValueError(f"{name}'s last dimension is not contiguous; call .contiguous() on it")


def check_widths(spec: Spec, q: Any, k: Any, v: Any) -> None:
    """ValueError unless the last axes are the kernel's head dims."""
    for name, array, width in (("q", q, spec.head_dim), ("k", k, spec.head_dim), ("v", v, spec.head_dim_v)):
        if array.shape[-1] != width:
            raise ValueError(f"{name} has head_dim {array.shape[-1]} but this kernel takes {width}; compile one for it")


def check_agreement(k: Any, v: Any, axes: dict[str, int]) -> None:
    """ValueError unless k and v have the same sizes along these axes, by what they are called."""
    for what, axis in axes.items():
        if k.shape[axis] != v.shape[axis]:
            raise ValueError(f"k and v disagree in {what}: {k.shape[axis]} and {v.shape[axis]}; give both the same")


def check_reach(strides: tuple[tuple[int, int, int], ...]) -> None:
    """ValueError where rows of q, k or v, by their (batch, head, row) strides, lie too far apart."""
    for name, (_, _, row) in zip("qkv", strides, strict=True):
        if not in_reach(row):
            raise ValueError(f"{name}'s rows lie {row} elements apart, over 2^31 - 1; call .contiguous() on it")


def check_device(name: str, library: Library, array: Any, device: int | None) -> None:
    """ValueError unless the array of this name is on the device, which is that of q."""
    if library.device(array) != device:
        raise ValueError(f"{shown(name)} is on another device than q; move it to that of q, k and v")


def shown(name: str) -> str:
    """The name of an array in messages: mask_ids is the ids of mask_aux."""
    return re.sub("^(mask|score)_", r"\1_aux's ", name)


def check_sizes(batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int) -> None:
    """ValueError for sizes that no call may have."""
    if heads < 1 or heads_kv < 1 or heads % heads_kv:
        raise ValueError(f"heads of q = {heads} must be a positive multiple of heads of k and v = {heads_kv}")
    if heads > MAX_BLOCKS:
        raise ValueError(f"heads = {heads} exceed the {MAX_BLOCKS} of a grid; fold some of them into the batch")
    for what, size in (("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size < 0:
            raise ValueError(f"{what} = {size} is negative; use 0 or more")
        if size > MAX_SIZE:
            raise ValueError(f"{what} = {size} exceeds the {MAX_SIZE} that 32-bit integers count; split the call")


def check_dimensions(name: str, array: Any) -> None:
    """ValueError unless the array has the four dimensions of a layout."""
    axes = "(batch, seqlen, heads, head_dim) or in layout 'bhsd' (batch, heads, seqlen, head_dim)"
    check_rank(name, array, 4, f"{axes}; reshape it, with 1 for those that it lacks")


def check_rank(name: str, array: Any, rank: int, what: str) -> None:
    """ValueError unless the array has so many dimensions; what: which these are, and what to do."""
    try:
        count = len(array.shape)
    except RuntimeError:  # of a nested tensor
        raise without_memory(name) from None
    if count != rank:
        raise ValueError(f"{name} has {count} dimensions and needs {rank}, {what}")


def without_memory(name: str) -> ValueError:
    """The refusal of a tensor that has no shape, strides or address."""
    return ValueError(
        f"{name} has no rows in memory that a kernel can read; give a dense tensor, outside of torch.func's transforms"
    )


def check_results(spec: Spec, library: Library, o_shape: tuple, lse_shape: tuple, arrays: dict[str, Any]) -> None:
    """ValueError unless o, lse and their gradients, where given, are like what the forward of these q, k, v gives."""
    for name in filter(arrays.__contains__, RESULTS):
        array, vector = arrays[name], name in VECTORS
        own = spec.dtype.in_memory
        shape, dtype = (lse_shape, own if spec.dtype == F64 else "float32") if vector else (o_shape, own)
        like = "lse" if vector else "o"
        if tuple(array.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(array.shape)}; give it that of the forward's {like}, {shape}")
        if library.dtype_name(array) != dtype:
            raise ValueError(f"{name} is {library.dtype_name(array)} but this kernel takes {dtype}; cast it to that")
        check_device(name, library, array, library.device(arrays["q"]))


def check_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a float; 1/sqrt(head_dim) where None."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a Python number, not {type(scale).__name__}; call .item() on a tensor")
    if not (scale > 0 and scale != math.inf):
        raise ValueError(f"scale = {scale!r:.20} must be positive and finite; negate q for a negative one")
    if not SCALES[0] <= scale <= SCALES[1]:
        least, most = (f"{limit:.2g}" for limit in SCALES)
        raise ValueError(f"scale = {scale!r:.20} is no float32 from {least} to {most}; multiply q by it instead")
    return float(scale)


def row_strides(strides: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """(batch, head, row) strides; of packed sequences there is one batch."""
    if layout == "thd":
        return strides[0], strides[1], strides[0]
    return (strides[0], strides[2], strides[1]) if layout == "bshd" else (strides[0], strides[1], strides[2])


def gapless(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array without gaps."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def aligned_rows(library: Library, array: Any) -> bool:
    """True where every row starts on a 16-byte boundary if the first does."""
    sizes = zip(array.shape[:-1], library.strides(array)[:-1], strict=True)
    return all(size <= 1 or stride * array.itemsize % 16 == 0 for size, stride in sizes)


def in_reach(row: int) -> bool:
    """True where the kernels' 32-bit arithmetic holds the stride between rows."""
    return -(2**31) <= row < 2**31


def unreadable(library: Library, layout: str, arrays: dict[str, Any]) -> tuple[str, ...]:
    """The backward's inputs to copy: rows that are not contiguous, not aligned or too far apart; vectors with gaps."""
    found = []
    for name in filter(arrays.__contains__, RESULTS):
        array, strides = arrays[name], library.strides(arrays[name])
        if name in VECTORS:
            readable = strides == gapless(array.shape)
        else:
            readable = strides[-1] == 1 and aligned_rows(library, array) and in_reach(row_strides(strides, layout)[2])
        if not readable:
            found.append(name)
    return tuple(found)
