"""Attention with more than `causal` to it: the same modification for flashgen, for flex attention and for the others.

Each variant is what a user of each would write: options of `flashgen.attention`, and arrays beside them; functions of
torch tensors, which flex attention compiles and the reference evaluates; keywords of `flash_attn_func`, where that has
them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashgen import masks, scores
from flashgen import variants as of_calls
from flashgen.ir.dtype import BF16, I32

if TYPE_CHECKING:
    from flashgen.bench.grid import Cell
    from flashgen.spec import Function

SOFTCAP = 50.0
WINDOW = 1024
DOCUMENTS = 16


@dataclass(frozen=True)
class Modification:
    """A variant for one cell.

    options: of `flashgen.attention`, without `causal`; arrays: `mask_aux` or `score_aux`, which its functions read.
    keywords: of `flash_attn_func`; None where it cannot do it.
    score: (score, b, h, q_idx, kv_idx) -> score, and mask: (b, h, q_idx, kv_idx) -> bool, on torch tensors; the mask
    without `causal`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] | None = None
    score: Callable | None = None
    mask: Callable | None = None


def options(variant: str) -> dict[str, Any]:
    """The options of `flashgen.attention` for a variant, without `causal` and arrays; none for "", no variant."""
    found: dict[str, dict[str, Any]] = {
        "": {},
        "softcap": {"softcap": SOFTCAP},
        "alibi": {"score_mod": scores.alibi},
        "bias": {"score_mod": scores.bias},
        "window": {"window": (WINDOW, 0)},
        "document": {"mask_mod": masks.document},
    }
    return found[variant]


DTYPES: dict[str, dict[str, Any]] = {"bias": {"score_dtypes": (BF16,)}, "document": {"mask_dtypes": (I32,)}}


def functions(variant: str, causal: bool) -> tuple[bool, Function | None, Function | None]:
    """`causal`, `mask` and `score` of the Spec that a call with a variant has, by the types of the variant's arrays."""
    return of_calls.functions(causal, **options(variant), **DTYPES.get(variant, {}))


def softcap(cell: Cell, device: str) -> Modification:
    """Scores between -50 and 50."""
    import torch

    def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    return Modification(options("softcap"), keywords={"softcap": SOFTCAP}, score=capped)


def alibi(cell: Cell, device: str) -> Modification:
    """A slope a head, 2^(-8 (h + 1) / heads), times the distance."""
    import torch

    slopes = torch.exp2(-8.0 * torch.arange(1, cell.heads + 1, device=device) / cell.heads)

    def sloped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx).abs()

    return Modification(options("alibi"), score=sloped)


def bias(cell: Cell, device: str) -> Modification:
    """A bf16 number of its own for each head, query and key, the same for the whole batch; without a gradient."""
    import torch

    generator = torch.Generator(device=device).manual_seed(1)
    shape = (cell.heads, cell.seqlen, cell.seqlen)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + values[h, q_idx, kv_idx]

    expanded = values.expand(cell.batch, *shape)
    return Modification(options("bias"), {"score_aux": (expanded,)}, score=biased)


def window(cell: Cell, device: str) -> Modification:
    """The 1024 keys before a query, and its own."""

    def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= WINDOW

    return Modification(options("window"), keywords={"window_size": (WINDOW, 0)}, mask=near)


def document(cell: Cell, device: str) -> Modification:
    """16 documents of random lengths in a sequence."""
    import torch

    lengths = document_lengths(cell.seqlen)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device, torch.int32)
    ids = ids.expand(cell.batch, cell.seqlen).contiguous()

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[b, q_idx] == ids[b, kv_idx]

    return Modification(options("document"), {"mask_aux": (ids,)}, mask=same)


VARIANTS: dict[str, Callable[[Cell, str], Modification]] = {
    function.__name__: function for function in (softcap, alibi, bias, window, document)
}
CAUSAL = {name: name != "bias" for name in VARIANTS}  # which are timed with, and which without `causal`


@lru_cache(maxsize=1)  # a bias takes up to 17 GiB: all competitors of a cell, and the reference, read the same one
def modification(cell: Cell, device: str) -> Modification:
    """The variant of a cell; none for a cell without one."""
    return VARIANTS[cell.variant](cell, device) if cell.variant else Modification(keywords={})


def document_lengths(seqlen: int) -> list[int]:
    """The lengths of the documents of a sequence, which they fill; always the same for the same length."""
    count = min(DOCUMENTS, seqlen)
    cuts = sorted(random.Random(seqlen).sample(range(1, seqlen), count - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, seqlen], strict=True)]


def visible(variant: str, causal: bool, seqlen: int) -> int:
    """How many keys all queries of a sequence see, half of the square counting as causal."""
    if variant == "window":
        outside = max(0, seqlen - WINDOW)
        return (seqlen * seqlen - outside * outside) // 2
    squares = sum(length * length for length in document_lengths(seqlen)) if variant == "document" else seqlen * seqlen
    return squares // (2 if causal else 1)
