"""Which blocks a mask shows: the elements that are visible in each square block of the scores, counted.

A row of the register tile is a block of keys, and a column one of its keys: for one query after another the row sums
then count the visible elements of many blocks, and nothing larger than that is kept. The mask is the expression that
the kernels of the spec evaluate. 0 is a block to skip, and block_size^2 a full one.
"""

from __future__ import annotations

from flashgen.attention import parts
from flashgen.attention.parts import BATCH, BATCHES, HEAD, HEADS, Q_BLOCK, Q_START, SEQLEN_Q
from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import Const, I, Var, ceil_div, minimum, select, substitute
from flashgen.ir.nodes import (
    Axis,
    Buffer,
    Copy,
    Fill,
    For,
    Kernel,
    Let,
    Level,
    Map,
    RowReduce,
    Scalar,
    Space,
    Window,
)
from flashgen.spec import Spec

NAME = "attention_blocks"
BLOCK_SIZE, TILE_BLOCKS = Var("block_size"), Var("tile_blocks")
KV_BLOCKS, Q_BLOCKS, PLACE, QUERY, FIRST = (
    Var(name) for name in ("kv_blocks", "q_blocks", "place", "query", "first_block")
)


def blocks(spec: Spec) -> Kernel:
    """The kernel that counts: visible (batch, heads * blocks of queries, blocks of keys), float32."""
    tiles = ceil_div(KV_BLOCKS, TILE_BLOCKS)
    visible = substitute(parts.visible(spec), {"i": QUERY, "kv_start": (FIRST + I) * BLOCK_SIZE})
    step = (
        Map("shown", select(visible, 1.0, 0.0)),
        RowReduce("count", "sum", "shown"),
    )
    return Kernel(
        name=NAME,
        level=Level.TILE,
        scalars=tuple(Scalar(name, I32) for name in ("seqlen_q", "seqlen_k", "heads", "batches", "kv_blocks")),
        axes=(
            Axis("place", ceil_div(SEQLEN_Q, BLOCK_SIZE) * tiles),
            Axis("head", HEADS),
            Axis("batch", BATCHES),
        ),
        buffers=(
            Buffer("visible", ("batches", "heads_q_blocks", "kv_blocks"), F32, Space.GLOBAL),
            parts.register("shown", "tile_blocks", "block_size"),
            parts.register("count", "tile_blocks"),
            *parts.arrays(spec),
        ),
        body=(
            Let("q_blocks", ceil_div(SEQLEN_Q, BLOCK_SIZE)),
            Let("q_block", PLACE % Q_BLOCKS),
            Let("first_block", PLACE // Q_BLOCKS * TILE_BLOCKS, note="of keys: a row of the tile for each"),
            Let("q_start", Q_BLOCK * BLOCK_SIZE),
            Fill("count", Const(0.0)),
            For("query", Const(0), minimum(BLOCK_SIZE, SEQLEN_Q - Q_START), step),
            Copy(Window("visible", (BATCH, HEAD * Q_BLOCKS + Q_BLOCK, FIRST)), "count"),
        ),
    )
