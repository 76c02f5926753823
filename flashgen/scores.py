"""Score functions to hand to `flashgen.compile(score_mod=...)`, and the one behind `softcap`.

A score function is one of (score, b, h, q_idx, kv_idx), and gives what takes the place of the score: the product of
query and key, scaled. These are written as a user would write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.trace.functions import exp2, heads, seqlen_k, seqlen_q, tanh

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


alibi.file_name = "alibi"  # type: ignore[attr-defined]
bias.file_name = "bias"  # type: ignore[attr-defined]
slopes.file_name = "slopes"  # type: ignore[attr-defined]
slopes_by_batch.file_name = "alibi_slopes"  # type: ignore[attr-defined]
