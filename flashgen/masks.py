"""Masks to hand to `flashgen.compile(mask_mod=...)`, and those behind `causal` and `window`.

A mask is a function of (b, h, q_idx, kv_idx), true where the query sees the key. These are written as a user would
write them. Sizes are constants of the kernel; the lengths of the sequences, which the diagonal of "bottom-right" needs,
are `flashgen.seqlen_q` and `flashgen.seqlen_k`. What differs from call to call comes in arrays, as the last arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashgen.trace.functions import seqlen_k, seqlen_q

Mask = Callable[..., Any]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Bottom-right aligned: the last query sees every key, query i those up to i + seqlen_k - seqlen_q."""
    return kv_idx <= q_idx + (seqlen_k - seqlen_q)


def causal_top_left(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Top-left aligned: query i sees the keys up to i."""
    return kv_idx <= q_idx


def window(left: int | None, right: int | None, top_left: bool = False) -> Mask:
    """Keys from `left` before to `right` behind a query's own place, None for any number.

    Its own place is i + seqlen_k - seqlen_q, bottom-right aligned as `causal`, or i where top_left.
    """

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = q_idx if top_left else q_idx + (seqlen_k - seqlen_q)
        not_before = True if left is None else kv_idx >= place - left
        not_behind = True if right is None else kv_idx <= place + right
        return not_before & not_behind

    sides = "_".join("all" if side is None else str(side) for side in (left, right))
    return _filed(sees, f"window{sides}{'_top_left' * top_left}")


def sink_window(left: int | None, right: int | None, first: int = 4, top_left: bool = False) -> Mask:
    """`window`, and beside it the `first` keys of a sequence, in no query's future ("attention sinks" of StreamingLLM).

    No key behind a query's own place but those of `right` is seen. Blocks of keys between the first ones and the window
    are not skipped: an interval of blocks has no hole.
    """
    near = window(left, right, top_left)
    past = window(None, right, top_left)

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return near(b, h, q_idx, kv_idx) | ((kv_idx < first) & past(b, h, q_idx, kv_idx))

    return _filed(sees, f"first{first}_{near.file_name}")  # type: ignore[attr-defined]


def prefix(length: int) -> Mask:
    """Prefix-LM: every query sees the first `length` keys, and else what `causal` shows it."""

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < length) | causal(b, h, q_idx, kv_idx)

    return _filed(sees, f"prefix{length}")


def chunked(size: int) -> Mask:
    """Queries see the keys of their own chunk: positions from a multiple of `size` up to the next."""

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + (seqlen_k - seqlen_q)) // size == kv_idx // size

    return _filed(sees, f"chunked{size}")


def dilated(step: int) -> Mask:
    """Every `step`-th key, counted from a query's own place in both directions."""

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx + (seqlen_k - seqlen_q) - kv_idx) % step == 0

    return _filed(sees, f"dilated{step}")


def strided(step: int) -> Mask:
    """The last `step` keys up to a query's own place, and of all keys every `step`-th, the last of each stride."""

    def sees(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = q_idx + (seqlen_k - seqlen_q)
        near = (kv_idx > place - step) & (kv_idx <= place)
        return near | (kv_idx % step == step - 1)

    return _filed(sees, f"strided{step}")


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any, ids: Any) -> Any:
    """Queries see the keys of their own document: `mask_aux=(ids,)`, integers (batch, seqlen) for as many queries as
    keys."""
    return ids[b, q_idx] == ids[b, kv_idx]


def _filed(function: Mask, name: str) -> Mask:
    """The function with the name that it has in files."""
    function.file_name = name  # type: ignore[attr-defined]
    return function


_filed(causal, "causal")
_filed(causal_top_left, "causal_top_left")
_filed(document, "document")
