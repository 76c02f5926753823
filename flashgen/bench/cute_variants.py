"""Variants as FlashAttention-4 takes them: functions in the CUTLASS Python language, and the blocks that a mask leaves.

Imported where FlashAttention-4 is timed, and there alone: it needs CUTLASS. Written after flash-attn-4 4.0.0b36, which
passes `q_idx`, `kv_idx`, `seqlen_info` and `aux_tensors` by these names. Its functions work on small vectors: of a few
scores, of one position of a mask. Given both `mask_mod` and `causal`, its forward drops `causal` and its backward the
mask, so the mask says both here and `causal` is off.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import cute
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

from flashgen.bench.grid import Cell
from flashgen.bench.variants import Modification


def keywords(cell: Cell, changed: Modification) -> dict[str, Any]:
    """What `flash_attn_func` gets beside q, k, v for a cell whose variant is "alibi" or "document"."""
    if cell.variant == "alibi":
        return {"causal": True, "score_mod": sloped(cell.heads), "score_mod_bwd": unchanged}
    ids = changed.arrays["mask_aux"][0]
    return {"causal": False, "mask_mod": earlier_in_document, "aux_tensors": [ids]} | blocks(cell, changed, ids.device)


def sloped(heads: int) -> Any:
    """The scores less the distance times the head's slope, where no key lies behind its query."""
    step = -8.0 / heads

    # Neither this nor the others are annotated: the language reads the annotations of its functions.
    @cute.jit
    def score_mod(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h_idx + 1).to(cutlass.Float32) * step, fastmath=True)
        return score - slope * (q_idx - kv_idx).to(cutlass.Float32)

    return score_mod


@cute.jit
def unchanged(grad, score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    return grad


@cute.jit
def earlier_in_document(b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    ids = aux_tensors[0]
    b = ssa_to_scalar(b_idx)
    of_query = scalar_to_ssa(ids[b, ssa_to_scalar(q_idx)], cutlass.Int32)
    of_key = scalar_to_ssa(ids[b, ssa_to_scalar(kv_idx)], cutlass.Int32)
    return (of_query == of_key) & (q_idx >= kv_idx)


def blocks(cell: Cell, changed: Modification, device: torch.device) -> dict[str, BlockSparseTensorsTorch]:
    """Which blocks the forward visits for each block of queries, and the backward for each block of keys.

    Of one head, which `flash_attn_func` spreads over all.
    """
    size = (128, block_of_keys(cell.head_dim))
    sees = and_masks(lambda b, h, q, kv: q >= kv, changed.mask)
    made = create_block_mask(sees, cell.batch, None, cell.seqlen, cell.seqlen, device=device, BLOCK_SIZE=size)
    return {"block_sparse_tensors": visited(made, "kv", size), "block_sparse_tensors_bwd": visited(made, "q", size)}


def block_of_keys(head_dim: int) -> int:
    """The largest block of keys that the tiles of both directions take on Hopper."""
    return 128 if head_dim <= 128 else 96 if head_dim <= 192 else 64


def visited(made: BlockMask, side: str, size: tuple[int, int]) -> BlockSparseTensorsTorch:
    """The blocks along one side of a mask: partial ones, to which the mask is applied, and full ones."""
    return BlockSparseTensorsTorch(
        mask_block_cnt=getattr(made, f"{side}_num_blocks"),
        mask_block_idx=getattr(made, f"{side}_indices"),
        full_block_cnt=getattr(made, f"full_{side}_num_blocks"),
        full_block_idx=getattr(made, f"full_{side}_indices"),
        block_size=size,
    )
