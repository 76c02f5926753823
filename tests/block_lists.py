"""Block lists for tests that run kernels by hand, and what they should say, made of a dense mask by NumPy alone."""

import numpy as np

from flashgen.attention.lists import MAX_BLOCKS
from flashgen.interp import reference
from flashgen.interp.common import Uniform, evaluate
from flashgen.runtime.arrays import LIBRARIES
from flashgen.runtime.blocks import BlockMask, Request


def dense_mask(problem):
    """(batch, heads, seqlen_q, seqlen_k): what all masks of a problem's spec show."""
    shape = (problem.batches, problem.heads, problem.seqlen_q, problem.seqlen_k)
    names = dict(zip(("b", "h", "q_idx", "kv_idx"), np.ogrid[tuple(slice(size) for size in shape)], strict=True))
    names |= dict(zip(("batches", "heads", "seqlen_q", "seqlen_k"), shape, strict=True))
    mask = evaluate(problem.spec.mask.expr, Uniform(names, problem.aux)) if problem.spec.mask else True
    causal = reference.causal_mask(*shape[2:]) if problem.spec.causal else True
    return np.broadcast_to(np.asarray(mask) & causal, shape)


def block_mask(spec, mask, block_size):
    """A BlockMask of a dense mask."""
    batch, heads, seqlen_q, seqlen_k = mask.shape
    rows, columns = -(-seqlen_q // block_size), -(-seqlen_k // block_size)
    padded = np.zeros((batch, heads, rows * block_size, columns * block_size), np.float32)
    padded[:, :, :seqlen_q, :seqlen_k] = mask
    visible = padded.reshape(batch, heads, rows, block_size, columns, block_size).sum((3, 5))
    return BlockMask(spec, LIBRARIES["numpy"], visible.astype(np.float32), mask.shape, block_size)


def add_lists(problem, sizes, block_size=16):
    """Puts the lists for tiles of these sizes among the arrays of a problem; returns the block mask."""
    found = block_mask(problem.spec, dense_mask(problem), block_size)
    group, packed = problem.heads // problem.heads_kv, problem.spec.packed
    block_q, block_kv = sizes["block_q"], sizes["block_kv"]
    requests = [Request("kv_list", block_q // packed, block_kv, packed), Request("q_list", block_q, block_kv, group)]
    problem.arrays |= {request.name: found.list_for(request, None) for request in requests}
    return found


def entries(lists):
    """(place, partial) of each entry, for each row of a list, and that the rows are in ascending order."""
    found = []
    for row in lists.reshape(-1, lists.shape[-1]):
        seen = row[1 : 1 + row[0]]
        assert np.all(np.diff(seen) > 0)
        found.append([(int(entry) // 2, int(entry) % 2) for entry in seen])
    return found


def expected(mask, request):
    """What `entries` of a list must be where blocks divide the tiles."""
    batch, heads, seqlen_q, seqlen_k = mask.shape
    tile_q, tile_kv = request.block_q, request.block_kv
    rows, columns = -(-seqlen_q // tile_q), -(-seqlen_k // tile_kv)

    def state(b, some, i, j):
        part = mask[b, some, i * tile_q : (i + 1) * tile_q, j * tile_kv : (j + 1) * tile_kv]
        whole = (i + 1) * tile_q <= seqlen_q and (j + 1) * tile_kv <= seqlen_k
        return None if not part.any() else 0 if whole and part.all() else 1

    found = []
    for b in range(batch):
        for first in range(0, heads, request.heads):
            if request.name == "kv_list":
                some = slice(first, first + request.heads)
                for i in range(rows):
                    states = [(j, state(b, some, i, j)) for j in range(columns)]
                    found.append([(j, partial) for j, partial in states if partial is not None])
                continue
            for j in range(columns):
                states = [(h, i, state(b, first + h, i, j)) for h in range(request.heads) for i in range(rows)]
                found.append([(h * MAX_BLOCKS + i, partial) for h, i, partial in states if partial is not None])
    return found
