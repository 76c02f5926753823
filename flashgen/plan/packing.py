"""How many query heads of one key head share a tile of queries.

A tile has 64 rows for each warpgroup. The few queries of a decoding step leave most rows of a tile of one head empty,
and every head of a group reads the same keys. Rows of several heads fill it, and read them once.
"""

from __future__ import annotations

from collections.abc import Callable

from flashgen.spec import MAX_PACKED

# How full tiles of one head may be, beside those of several, before another kernel is worth its compile. Not measured.
NEARLY = 0.9


def fullness(seqlen_q: int, positions: int) -> float:
    """The part of the rows of tiles that are queries, where a tile has `positions` rows of a head."""
    return seqlen_q / (-(-seqlen_q // positions) * positions)


def heads_to_pack(seqlen_q: int, group: int, block_q: Callable[[int], int]) -> int:
    """Heads of a group that should share a tile: 1 where tiles of one head are nearly as full as those of several.

    Else the power of two among the group's divisors whose tiles are the fullest; of equals the least. block_q: rows of
    a tile, by the heads that share it; 0 where none has room.
    """
    counts = [1 << n for n in range(1, MAX_PACKED.bit_length()) if group % (1 << n) == 0]
    if not counts or not seqlen_q:
        return 1
    positions = {count: block_q(count) // count for count in (1, *counts)}
    full = {count: fullness(seqlen_q, some) if some else 0.0 for count, some in positions.items()}
    best = max(counts, key=lambda count: (full[count], -count))
    return best if full[1] < NEARLY * full[best] else 1
