"""The dropout of a call: what it may be, and how kernels are told."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from flashgen.attention import dropout
from flashgen.runtime.arguments import Problem
from flashgen.runtime.launch import MAX_BLOCKS
from flashgen.spec import Spec, parse_integer

FIRST = dropout.SCALARS[0].name
LAYOUT = struct.Struct("<iiiif")  # SCALARS, which lie behind each other
SEED_BITS, OFFSET_BITS = 64, 32


@dataclass(frozen=True)
class Drop:
    """What is dropped of one call: with probability p, 0 < p < 1, by the random numbers of a seed and an offset."""

    p: float
    seed: int
    offset: int

    def scalars(self) -> dict[str, int | float]:
        """What kernels are told, by name."""
        return dropout.values(self.p, self.seed, self.offset)

    def packed(self) -> bytes:
        """The same as it lies in the arguments of a launch."""
        return LAYOUT.pack(*self.scalars().values())


def asked(spec: Spec, p: Any, seed: Any, offset: Any) -> Drop | None:
    """The dropout of a call, None for p = 0. Raises TypeError or ValueError where it is none, or was not asked for."""
    if not spec.dropout:
        if p is not None or seed is not None:
            raise ValueError("dropout is given but this kernel was compiled without it; compile(..., dropout=True)")
        return None
    if p is None:
        raise ValueError("this kernel takes dropout_p and dropout_seed; give kernel(q, k, v, dropout_p=0.0) for none")
    return parse(p, seed, offset)


def parse(p: Any, seed: Any, offset: Any) -> Drop | None:
    """The same, of any kernel."""
    if isinstance(p, bool) or not isinstance(p, int | float):
        raise TypeError(f"dropout_p must be a Python number from 0 up to but not 1, not {type(p).__name__}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout_p = {p!r:.20} must be at least 0 and less than 1: the part that is dropped")
    if seed is None:
        if p > 0.0:
            raise ValueError("dropout_p is given but no dropout_seed; give an integer, the same for the same mask")
        seed = 0
    instead = "use a Python integer; call .item() on a tensor"
    seed = parse_integer("dropout_seed", seed, instead)
    offset = parse_integer("dropout_offset", offset, instead)
    for name, value, bits in (("dropout_seed", seed, SEED_BITS), ("dropout_offset", offset, OFFSET_BITS)):
        if not 0 <= value < 2**bits:
            raise ValueError(f"{name} = {value} must be from 0 to 2^{bits} - 1")
    return Drop(float(p), seed, offset) if p > 0.0 else None


def check(spec: Spec, problem: Problem) -> None:
    """ValueError for more batches than one launch has: within it they are counted."""
    if spec.dropout and problem.batch > MAX_BLOCKS:
        raise ValueError(
            f"batch = {problem.batch} exceeds {MAX_BLOCKS}, which with dropout is the limit; split the batch, and give "
            "the parts offsets of their own"
        )


def mask(seed: int, offset: int, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Any:
    """Which probabilities `kernel(q, k, v, dropout_p=p, dropout_seed=seed, dropout_offset=offset)` keeps.

    Returns a NumPy array of bool, (batch, heads, seqlen_q, seqlen_k), True for what is kept. An element is kept where
    its random integer is below round((1 - p) * 2^32) - 2^31. That integer is a word of Philox4x32-10 (Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", 2011), from -2^31 on, of which the key is the seed, its low word
    first, and the counter is (kv, q, b * heads + h, offset), where elements 8 queries or 8 keys apart share one:
        kv = kv_idx // 16 * 8 + kv_idx % 8     q = q_idx // 16 * 8 + q_idx % 8
    Of the four words an element has number 2 * (q_idx // 8 % 2) + kv_idx // 8 % 2.
    Of packed sequences b is the number of the sequence, and q_idx and kv_idx are counted within it: with the longest
    lengths, sequence b keeps what mask[b, :, :queries, :keys] says.
    Raises ValueError or TypeError for what is no dropout of a call, and for sizes that are negative.
    """
    import numpy as np

    from flashgen.interp import philox

    given = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes = [parse_integer(name, size, "use a whole number") for name, size in given.items()]
    if min(sizes) < 0:
        raise ValueError(f"dropout_mask is asked for sizes {tuple(sizes)}; none of them may be negative")
    drop = parse(p, seed, offset)
    if drop is None:
        return np.ones(sizes, bool)
    integers = philox.integers(drop.seed, drop.offset, sizes[0] * sizes[1], *sizes[2:])
    return (integers < drop.scalars()["keep_below"]).reshape(sizes)
