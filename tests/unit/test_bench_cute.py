"""FlashAttention-4's variants without FlashAttention-4: its functions on torch tensors, its blocks as a dense mask.

What stands in for CUTLASS takes tensors of one element for its vectors: that shows what the functions compute, and not
that its compiler takes them.
"""

from __future__ import annotations

import sys
import types
from typing import NamedTuple

import pytest

from flashgen.bench import grid, peers, variants
from flashgen.bench.grid import Cell

torch = pytest.importorskip("torch")
torch.set_num_threads(1)
from flashgen.bench import measure  # noqa: E402  (imports torch)


class Blocks(NamedTuple):
    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    block_size: tuple


def module_of(name, **entries):
    made = types.ModuleType(name)
    vars(made).update(entries)
    return made


def each(function, first, b, h, seqlen, aux):
    """A function of FlashAttention-4 for every query and key, by the names that it passes."""
    one = [torch.tensor([place], dtype=torch.int32) for place in range(max(b, h, seqlen - 1) + 1)]
    given = {"seqlen_info": None, "aux_tensors": aux}
    rows = [
        torch.cat(
            [function(*first(q, kv), one[b], one[h], q_idx=one[q], kv_idx=one[kv], **given) for kv in range(seqlen)]
        )
        for q in range(seqlen)
    ]
    return torch.stack(rows)


def attend(q, k, v, causal, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=(), **blocks):
    """flash_attn_func by its definition; (o, lse) as it returns."""
    batch, seqlen, heads, head_dim = q.shape
    o = []
    for b in range(batch):
        for h in range(heads):
            score = q[b, :, h].float() @ k[b, :, h].float().T / head_dim**0.5
            if score_mod:
                score = each(score_mod, lambda i, j, s=score: (s[i, j : j + 1],), b, h, seqlen, aux_tensors)
            if mask_mod:
                assert not causal and set(blocks) == {"block_sparse_tensors", "block_sparse_tensors_bwd"}
                seen = each(mask_mod, lambda i, j: (), b, h, seqlen, aux_tensors)
                score = score.masked_fill(~seen, float("-inf"))
            if causal:
                score = score.masked_fill(torch.ones_like(score).triu(1).bool(), float("-inf"))
            o.append(score.softmax(-1) @ v[b, :, h].float())
    return torch.stack(o).view(batch, heads, seqlen, head_dim).transpose(1, 2).to(q.dtype), None


@pytest.fixture
def fa4(monkeypatch):
    """A FlashAttention-4 of torch tensors."""
    maths = types.SimpleNamespace(exp2=lambda value, fastmath: torch.exp2(value))
    cute = module_of("cutlass.cute", jit=lambda function: function, math=maths)
    utils = {
        "scalar_to_ssa": lambda value, dtype: value.reshape(1).to(dtype),
        "ssa_to_scalar": lambda vector: vector[0],
    }
    for made in (
        module_of("cutlass", cute=cute, Int32=torch.int32, Float32=torch.float32),
        cute,
        module_of("flash_attn"),
        module_of("flash_attn.cute", flash_attn_func=attend),
        module_of("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=Blocks),
        module_of("flash_attn.cute.utils", **utils),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.delitem(sys.modules, "flashgen.bench.cute_variants", raising=False)
    yield peers.Fa4()
    sys.modules.pop("flashgen.bench.cute_variants", None)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("variant", ["alibi", "document"])
def test_functions_are_the_variant(fa4, monkeypatch, variant, direction):
    monkeypatch.setattr(grid, "TOKENS", 48)
    monkeypatch.setattr(grid, "CHANNELS", 32)
    monkeypatch.setattr(variants, "DOCUMENTS", 3)
    cell = Cell(direction, 16, True, 24, variant)
    assert not fa4.supports(cell)
    inputs = measure.make_inputs(cell, "cpu", 0)
    norm, row = measure.compare(measure.launcher(fa4, cell, inputs)(), measure.reference(cell, inputs))
    assert norm < 0.01 and row < 0.02


def test_the_gradient_of_a_distance_taken_off_is_that_of_the_score(fa4):
    cell = Cell("bwd", 64, True, 512, "alibi")
    made = fa4.keywords(cell, variants.modification(cell, "cpu"))
    given = {"q_idx": None, "kv_idx": None, "seqlen_info": None, "aux_tensors": ()}
    assert made["score_mod_bwd"](3.0, 5.0, None, None, **given) == 3.0


@pytest.mark.parametrize(("head_dim", "keys"), [(64, 128), (128, 128), (192, 96), (256, 64)])
def test_blocks_are_those_that_are_seen(fa4, monkeypatch, head_dim, keys):
    """Both lists with the mask on their partial blocks give the mask; full blocks are full."""
    monkeypatch.setattr(grid, "TOKENS", 2048)
    monkeypatch.setattr(variants, "DOCUMENTS", 3)
    cell = Cell("fwd", head_dim, True, 1024, "document")
    changed = variants.modification(cell, "cpu")
    made = fa4.keywords(cell, changed)
    forward, backward = made["block_sparse_tensors"], made["block_sparse_tensors_bwd"]
    assert forward.block_size == backward.block_size == (128, keys)
    place = torch.arange(1024)
    for b in range(cell.batch):
        wanted = changed.mask(b, 0, place[:, None], place[None, :]) & (place[:, None] >= place[None, :])
        for lists, flip in ((forward, False), (backward, True)):
            seen = torch.zeros_like(wanted)
            for kind, (count, index) in {"partial": lists[:2], "full": lists[2:4]}.items():
                for row in range(count.shape[2]):
                    for column in index[b, 0, row, : count[b, 0, row]].tolist():
                        m, n = (column, row) if flip else (row, column)
                        block = slice(128 * m, 128 * (m + 1)), slice(keys * n, keys * (n + 1))
                        assert not seen[block].any()
                        seen[block] = wanted[block] if kind == "partial" else True
            assert torch.equal(seen, wanted)
            assert lists.full_block_cnt.sum() > 0
