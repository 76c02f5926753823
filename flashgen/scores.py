"""Score functions to hand to `flashgen.compile(score_mod=...)`, and the one behind `softcap`.

A score function is one of (score, b, h, q_idx, kv_idx), and gives what takes the place of the score: the product of
query and key, scaled. These are written as a user would write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.trace.functions import exp2, heads, maximum, minimum, seqlen_k, seqlen_q, tanh

Score = Callable[..., Any]


def softcap(cap: float) -> Score:
    """Scores between -cap and cap: cap * tanh(score / cap)."""

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return tanh(score / cap) * cap

    capped.file_name = f"softcap{cap:g}".replace(".", "p")  # type: ignore[attr-defined]
    return capped


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Less for keys that are further away, by the slope of the head: 2^(-8 (h + 1) / heads)."""
    slope = exp2(-8.0 * (h + 1) / heads)
    return score - slope * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)


def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, biases: Any) -> Any:
    """A number added to each score: `score_aux=(biases,)`, (batch, heads, seqlen_q, seqlen_k); expand what is less."""
    return score + biases[b, h, q_idx, kv_idx]


def slopes(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, of_heads: Any) -> Any:
    """As `alibi`, with slopes of one's own: `score_aux=(of_heads,)`, a number for each head."""
    return score - of_heads[h] * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)


def slopes_by_batch(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, of_heads: Any) -> Any:
    """As `slopes`, with those of each batch: (batch, heads), or (1, heads) for all."""
    return score - of_heads[b, h] * abs(q_idx + (seqlen_k - seqlen_q) - kv_idx)


def relative_bias(buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Score:
    """T5's bias by the distance of query and key: `score_aux=(table,)`, (buckets, heads), learned.

    Half of the buckets are of one distance each, from 0 on; the others grow with its logarithm up to max_distance, from
    where on all share the last. bidirectional: half of all buckets are for keys behind the query's own place, which is
    q_idx + seqlen_k - seqlen_q; else these count as distance 0. (Raffel et al., arXiv:1910.10683, section 2.1; its
    `relative_position_bucket`.) Raises ValueError for fewer than 4 buckets (2 where not bidirectional), and for a
    max_distance within the buckets of one distance.
    """
    count = buckets // 2 if bidirectional else buckets
    exact = count // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"buckets = {buckets} and max_distance = {max_distance}: use 4 buckets or more (2 without sides), and a "
            f"distance over {exact}"
        )
    # The first distance of each further bucket: exact * (max_distance / exact)^(k / steps), compared as integers.
    steps = count - exact
    firsts = tuple(
        next(n for n in range(exact, max_distance + 1) if n**steps >= max_distance**k * exact ** (steps - k))
        for k in range(1, steps)
    )

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
        behind = kv_idx - (q_idx + (seqlen_k - seqlen_q))
        distance = abs(behind) if bidirectional else maximum(-behind, 0)
        bucket = minimum(distance, exact) + sum((distance >= first) * 1 for first in firsts)
        return score + table[bucket + (behind > 0) * count if bidirectional else bucket, h]

    sides = "" if bidirectional else "_causal"
    biased.file_name = f"relative{buckets}_{max_distance}{sides}"  # type: ignore[attr-defined]
    return biased


alibi.file_name = "alibi"  # type: ignore[attr-defined]
bias.file_name = "bias"  # type: ignore[attr-defined]
slopes.file_name = "slopes"  # type: ignore[attr-defined]
slopes_by_batch.file_name = "alibi_slopes"  # type: ignore[attr-defined]
