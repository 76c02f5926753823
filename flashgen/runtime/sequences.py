"""What packed sequences must be: arrays of (total, heads, head_dim) and the rows at which each sequence begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashgen.attention.lengths import USED
from flashgen.runtime import lengths
from flashgen.runtime.arguments import (
    Problem,
    check_agreement,
    check_elements,
    check_rank,
    check_reach,
    check_sizes,
    check_widths,
    row_strides,
)
from flashgen.runtime.arrays import Library
from flashgen.spec import Spec, parse_integer

LAYOUT = "thd"  # total, heads, head_dim
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
MAX_TOTAL = 2**30  # rows: a tensor map counts them from there backwards


@dataclass(frozen=True)
class PackedProblem(Problem):
    """Sizes of a call with packed sequences: to the kernels one batch; seqlen_q and seqlen_k are the totals."""

    sequences: int = 0

    def padded_rows(self, block_q: int) -> int:
        """Rows of a workspace: each sequence starts at a whole block, of which the numbers leave some out."""
        return (self.seqlen_q // block_q + self.sequences) * block_q

    def summed_rows(self, block_q: int) -> int:
        """All that there are, those between sequences too."""
        return self.padded_rows(block_q)

    def scalars(self, scale: float) -> dict[str, int | float]:
        """As of sequences of one length, with the totals in place of that."""
        sizes = {"total_q": self.seqlen_q, "total_k": self.seqlen_k, "batches": self.sequences, "one": 1}
        return super().scalars(scale) | sizes


def check(spec: Spec, library: Library, arrays: Mapping[str, Any]) -> PackedProblem:
    """The sizes of a call, or a ValueError that names the argument, the limit and what to do."""
    q, k, v = (arrays[name] for name in "qkv")
    for name, array in zip("qkv", (q, k, v), strict=True):
        check_dimensions(name, array)
        check_elements(name, array, spec, library, q)
    check_widths(spec, q, k, v)
    strides = tuple(row_strides(library.strides(array), LAYOUT) for array in (q, k, v))
    check_reach(strides)
    check_agreement(k, v, {"total_k": 0, "heads_kv": 1})
    (total_q, heads), (total_k, heads_kv) = q.shape[:2], k.shape[:2]
    check_sizes(1, 0, 0, heads, heads_kv)
    for name, total in (("q", total_q), ("k", total_k)):
        if total > MAX_TOTAL:
            raise ValueError(f"{name} has {total} rows, more than {MAX_TOTAL} in one call; split the sequences")
    sequences = _count(library, arrays)
    if not sequences and (total_q or total_k):
        raise ValueError(f"there is no sequence for {total_q} and {total_k} rows; give cu_seqlens batch + 1 elements")
    sizes = (1, heads, heads_kv, total_q, total_k, spec.head_dim, spec.head_dim_v)
    return PackedProblem(*sizes, strides, sequences)


def check_dimensions(name: str, array: Any) -> None:
    """ValueError unless the array has three dimensions."""
    check_rank(name, array, 3, "(total, heads, head_dim), the sequences one behind the other; reshape it")


def _count(library: Library, arrays: Mapping[str, Any]) -> int:
    """The number of sequences."""
    for name in filter(arrays.__contains__, (*OFFSETS, USED)):
        lengths.check_integers(name, library, arrays)
    count, other = (arrays[name].shape[0] for name in OFFSETS)
    if count != other:
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k have {count} and {other} elements; give both batch + 1")
    if not count:
        raise ValueError("cu_seqlens_q has no element; give batch + 1, the first of which is 0")
    if USED in arrays and arrays[USED].shape[0] != count - 1:
        raise ValueError(f"{USED} has {arrays[USED].shape[0]} elements for {count - 1} sequences; give one for each")
    return count - 1


def check_values(library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError for offsets that do not begin with 0, fall, or do not end with the rows; or more keys used than there.

    Of arrays on a GPU this waits for the device.
    """
    counts = {}
    for name, of in zip(OFFSETS, "qk", strict=True):
        offsets = library.to_numpy(arrays[name], "int32").astype("int64")
        total = arrays[of].shape[0]
        counts[of] = offsets[1:] - offsets[:-1]
        if offsets[0] != 0:
            raise ValueError(f"{name} starts with {offsets[0]} and must with 0; give the sums of earlier lengths")
        if (counts[of] < 0).any():
            raise ValueError(f"{name} falls behind element {counts[of].argmin()}; it must be in rising order")
        if offsets[-1] != total:
            raise ValueError(f"{name} ends with {offsets[-1]} but {of} has {total} rows; both must agree")
    lengths.check_values(library, arrays, counts["k"])


def check_longest(name: str, longest: Any) -> int | None:
    """`max_seqlen_q` or `max_seqlen_k`, hints: None, or an int. TypeError or ValueError for others."""
    if longest is None:
        return None
    longest = parse_integer(name, longest, "use the length of the longest sequence, or None")
    if longest < 0:
        raise ValueError(f"{name} = {longest} is negative; use the length of the longest sequence, or None")
    return longest
