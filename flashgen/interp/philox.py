"""Philox4x32-10 in NumPy, and what dropout makes of it: `Random` of ir/expr.py says which element has which word."""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def words(key: tuple[int, int], counter: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
    """The four words for a counter of four words (Salmon et al., 2011, section 4.2 and table 2), 32 bits in uint64.

    Words of the counter are arrays of integers that broadcast; of every integer the lowest 32 bits count.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.int64).astype(np.uint64) & LOW for word in counter)
    k0, k1 = (int(word) & 0xFFFFFFFF for word in key)
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1 = (p1 >> HALF) ^ c1 ^ np.uint64(k0), p1 & LOW
        c2, c3 = (p0 >> HALF) ^ c3 ^ np.uint64(k1), p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def element(seed_low: int, seed_high: int, offset: int, sequence: Any, q_idx: Any, kv_idx: Any) -> np.ndarray:
    """The random integer of each element, from -2^31 to 2^31 - 1."""
    kv, q = (np.asarray(place) // 16 * 8 + np.asarray(place) % 8 for place in (kv_idx, q_idx))
    four = words((seed_low, seed_high), (kv, q, sequence, offset))
    which = 2 * (np.asarray(q_idx) // 8 % 2) + np.asarray(kv_idx) // 8 % 2
    return np.choose(which, four).astype(np.uint32).view(np.int32).astype(np.int64)


def integers(seed: int, offset: int, sequences: int, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """The random integers of all elements, int32 (sequences, seqlen_q, seqlen_k), with a fourth of the work."""
    rows, cols = (-(-length // 16) for length in (seqlen_q, seqlen_k))
    counter = (np.arange(cols * 8), np.arange(rows * 8)[:, None], np.arange(sequences)[:, None, None], offset)
    four = np.array(words((seed & 0xFFFFFFFF, seed >> 32), counter), np.uint32)
    parts = four.reshape(2, 2, sequences, rows, 8, cols, 8).transpose(2, 3, 0, 4, 5, 1, 6)
    whole = parts.reshape(sequences, rows * 16, cols * 16)[:, :seqlen_q, :seqlen_k]
    return np.ascontiguousarray(whole).view(np.int32)
