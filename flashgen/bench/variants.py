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
from itertools import accumulate
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
SEQUENCES, SHORTEST, LONGEST = 64, 32, 4096  # of packed ones: how many, and from what to what their lengths are drawn


@dataclass(frozen=True)
class Modification:
    """A variant for one cell.

    options: of `flashgen.attention`, without `causal`; arrays: `mask_aux` or `score_aux`, which its functions read.
    keywords: of `flash_attn_func`; None where it cannot do it.
    score: (score, b, h, q_idx, kv_idx) -> score, and mask: (b, h, q_idx, kv_idx) -> bool, on torch tensors; the mask
    without `causal`.
    lengths: of the sequences that lie one behind the other in one of cell.seqlen; empty where there is but that one.
    Where there are, options are of `flashgen.varlen_attention` and keywords of `flash_attn_varlen_func`.
    """

    options: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    keywords: dict[str, Any] | None = None
    score: Callable | None = None
    mask: Callable | None = None
    lengths: tuple[int, ...] = ()


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
    ids = numbers(document_lengths(cell.seqlen), device).expand(cell.batch, cell.seqlen).contiguous()

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[b, q_idx] == ids[b, kv_idx]

    return Modification(options("document"), {"mask_aux": (ids,)}, mask=same)


def packed(cell: Cell, device: str) -> Modification:
    """64 sequences of 32 to 4096 tokens, one behind the other; to flex attention they are documents."""
    import torch

    lengths = packed_lengths()
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    ids = numbers(lengths, device)
    told = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    told |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    return Modification(told, keywords=told, mask=same, lengths=tuple(lengths))


VARIANTS: dict[str, Callable[[Cell, str], Modification]] = {
    function.__name__: function for function in (softcap, alibi, bias, window, document, packed)
}
OF_ONE_LENGTH = [name for name in VARIANTS if name != "packed"]
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


def packed_lengths() -> list[int]:
    """The lengths of the packed sequences; always the same."""
    draw = random.Random(0)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES)]


def own_seqlens(variant: str) -> list[int]:
    """The sequence lengths of a variant that brings its own: of packed sequences, all their tokens. Else none."""
    return [sum(packed_lengths())] if variant == "packed" else []


def numbers(lengths: list[int], device: str) -> Any:
    """Which of the sequences each position belongs to, where they lie one behind the other: int32 (sum of lengths,)."""
    import torch

    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device, torch.int32)


def visible(variant: str, causal: bool, seqlen: int) -> int:
    """How many keys all queries of a sequence, or of all that are packed, see; half of the square counts as causal."""
    if variant == "window":
        outside = max(0, seqlen - WINDOW)
        return (seqlen * seqlen - outside * outside) // 2
    lengths = [seqlen]
    if variant == "document":
        lengths = document_lengths(seqlen)
    elif variant == "packed":
        lengths = packed_lengths()
    return sum(length * length for length in lengths) // (2 if causal else 1)
