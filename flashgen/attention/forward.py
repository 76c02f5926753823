"""The forward loop nest: one block of queries walks over the keys with the online softmax.

With m the running row maximum, l the running denominator and o the unnormalised output (FlashAttention, algorithm 1):
    m' = max(m, rowmax s)     p = exp(s - m')     l' = exp(m - m') l + rowsum p     o' = exp(m - m') o + p v
The exponentials are taken in base 2 with scale * log2(e) folded into one multiply-add; a score function takes the
scaled scores first, and leaves log2(e) to that.

Where packed, the rows of a block are several query heads of one key head, the same positions of each: few queries, as
in decoding, then fill a tile, and keys and values are read once for all of these heads.
"""

from __future__ import annotations

import math
from dataclasses import replace

from flashgen.attention import dropout, lists, parts, sinks, tiles
from flashgen.attention.parts import (
    BATCHES,
    GROUP,
    HEAD,
    HEAD_BLOCK,
    HEAD_KV,
    KV_START,
    Q_BLOCK,
    Q_START,
    SEQLEN_Q,
)
from flashgen.attention.varlen import of_sequences
from flashgen.ir.dtype import F32
from flashgen.ir.expr import NEG_INF, Cast, Const, I, J, ceil_div, exp2, load, log, select
from flashgen.ir.nodes import Axis, Buffer, Copy, Fill, Gemm, Kernel, Let, Level, Map, RowReduce, Scalar, Stmt
from flashgen.spec import Spec

NAME = "attention_forward"


@of_sequences
def forward(spec: Spec) -> Kernel:
    """The forward kernel of a spec, at TILE level: o and the natural-log LSE of each row."""
    return Kernel(
        name=NAME,
        level=Level.TILE,
        scalars=(
            *parts.SIZES,
            Scalar("scale_log2" if spec.score is None else "scale", F32),
            *dropout.scalars(spec),
            *tiles.scalars(spec),
        ),
        axes=(
            Axis("q_block", ceil_div(SEQLEN_Q, parts.positions(spec)), longest_first=parts.longest_first(spec)),
            parts.head_axis(spec),
            Axis("batch", BATCHES),
        ),
        buffers=_buffers(spec),
        body=(
            *_first_head(spec),
            Let("head_kv", HEAD // GROUP),
            Let("q_start", Q_BLOCK * parts.positions(spec)),
            Copy("q_tile", parts.rows_of("q", HEAD, Q_START, spec.packed)),
            Fill("o_acc", Const(0.0)),
            Fill("row_max", NEG_INF),
            Fill("row_sum", Const(0.0)),
            Fill("offset", Const(0.0)),
            *parts.over_keys(spec, HEAD // spec.packed, _step(spec)),
            *_epilogue(spec),
        ),
    )


def _first_head(spec: Spec) -> tuple[Stmt, ...]:
    """The first query head of a block that packs several."""
    if spec.packed == 1:
        return ()
    return (Let("head", HEAD_BLOCK * spec.packed, note="of the heads that share this tile"),)


def _buffers(spec: Spec) -> tuple[Buffer, ...]:
    return (
        parts.tensor("q", spec, "seqlen_q", "head_dim"),
        parts.tensor("k", spec, "seqlen_k", "head_dim"),
        *(() if spec.shared_kv else (parts.tensor("v", spec, "seqlen_k", "head_dim_v"),)),
        parts.tensor("o", spec, "seqlen_q", "head_dim_v"),
        parts.vector("lse"),
        parts.shared("q_tile", spec, "block_q", "head_dim"),
        parts.shared("k_tile", spec, "block_kv", "head_dim"),
        *(() if spec.shared_kv else (parts.shared("v_tile", spec, "block_kv", "head_dim_v"),)),
        *tiles.buffers(spec),
        parts.shared("o_tile", spec, "block_q", "head_dim_v"),
        parts.register("s", "block_q", "block_kv"),
        parts.register("p", "block_q", "block_kv"),
        parts.register("p_operand", "block_q", "block_kv", dtype=spec.dtype),
        parts.register("o_acc", "block_q", "head_dim_v"),
        parts.register("o_out", "block_q", "head_dim_v", dtype=spec.dtype),
        *(parts.register(name, "block_q") for name in ("row_max", "row_max_old", "offset", "rescale", "row_sum")),
        *(parts.register(name, "block_q") for name in ("inverse", "lse_row")),
        *(sinks.registers() if spec.sinks else ()),
        *parts.arrays(spec),
        *parts.sinks(spec),
        *((lists.KEYS,) if spec.listed else ()),
    )


def _step(spec: Spec) -> tuple[Stmt, ...]:
    """One block of keys."""
    factor = parts.exponent(spec)
    scored = () if spec.score is None else (Map("s", parts.scored(spec), note=spec.score.name),)
    product = Gemm("o_acc", "p_operand", "v_tile", accumulate=True)
    values: tuple[Stmt, ...] = (Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),)
    if spec.shared_kv:
        note = "values are the first columns of the keys"
        product, values = replace(product, b="k_tile", columns="head_dim_v", note=note), ()
    return (
        Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
        *parts.tile_copies(spec),
        *values,
        Gemm("s", "q_tile", "k_tile", transpose_b=True),
        *scored,
        parts.masked(spec),
        Map("row_max_old", load("row_max", I)),
        RowReduce("row_max", "max", "s"),
        Map(
            "offset",
            select(load("row_max", I).equals(NEG_INF), Const(0.0), load("row_max", I) * factor),
            note="a row that has seen no key yet keeps exp2(-inf - 0) = 0 instead of NaN",
        ),
        Map("rescale", exp2(load("row_max_old", I) * factor - load("offset", I))),
        Map("p", exp2(load("s", I, J) * factor - load("offset", I))),
        Map("row_sum", load("row_sum", I) * load("rescale", I)),
        RowReduce("row_sum", "sum", "p"),
        *dropout.dropped(spec),
        Map("p_operand", Cast(spec.dtype, load("p", I, J))),
        Map("o_acc", load("o_acc", I, J) * load("rescale", I)),
        product,
    )


def _epilogue(spec: Spec) -> tuple[Stmt, ...]:
    """Normalise, and keep log(sum exp) of each row for the backward pass."""
    return (
        *(sinks.epilogue(spec) if spec.sinks else _normalised()),
        *dropout.scaled(spec),
        Copy(parts.rows_of("lse", HEAD, Q_START, spec.packed), "lse_row"),
        Map("o_out", Cast(spec.dtype, load("o_acc", I, J) * load("inverse", I))),
        Copy("o_tile", "o_out"),
        Copy(parts.rows_of("o", HEAD, Q_START, spec.packed), "o_tile"),
    )


def _normalised() -> tuple[Stmt, ...]:
    """`inverse` and `lse_row` of each row, from `offset` and `row_sum`."""
    empty = load("row_sum", I).equals(Const(0.0))
    return (
        Map("inverse", select(empty, Const(0.0), Const(1.0) / load("row_sum", I)), note="rows without keys give O = 0"),
        Map(
            "lse_row",
            select(empty, NEG_INF, load("offset", I) * Const(math.log(2.0)) + log(load("row_sum", I))),
        ),
    )
