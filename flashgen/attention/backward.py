"""The backward loop nests: probabilities are recomputed from the scores and the log-sum-exp of each row.

With P = exp(scale * Q K^T - lse) and delta = rowsum(dO * O) - dlse (FlashAttention, algorithm 4; the gradient of the
LSE enters through delta, because d lse / d s = P):
    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q
With a score function f in between, P = exp(f(scale * Q K^T) - lse), and dS has f' as a factor, by which P is multiplied
as soon as dV has been given its own P: no more tiles are then kept than without.

`delta`: delta of each row, the LSE in base 2, and zeros for the dQ accumulator. Rows are padded to whole blocks, with
zeros, so that a block of either vector is copied without a look at where the sequence ends.
`backward`: a block of keys walks over the queries of every head of its group. Scores are transposed (keys are rows),
so that P^T and dS^T feed dV and dK from the registers that they were computed in.
`convert_dq`: scales the float32 accumulator of dQ and converts it.
`backward_dq`: dQ alone, a block of queries walking over the keys. It adds nothing atomically and so repeats exactly.
"""

from __future__ import annotations

import math

from flashgen.attention import dropout, lists, parts, tiles
from flashgen.attention.parts import (
    BATCHES,
    BLOCK_KV,
    BLOCK_Q,
    GROUP,
    HEAD,
    HEAD_KV,
    HEADS,
    HEADS_KV,
    KV_BLOCK,
    KV_START,
    Q_BLOCK,
    Q_START,
    SCALE,
    SEQLEN_K,
    SEQLEN_Q,
)
from flashgen.attention.varlen import of_sequences
from flashgen.ir.dtype import F32
from flashgen.ir.expr import INF, NEG_INF, Cast, Const, Expr, I, J, Var, ceil_div, exp2, load, select, walk
from flashgen.ir.nodes import (
    Accumulate,
    Axis,
    Buffer,
    Copy,
    Fill,
    For,
    Gemm,
    Kernel,
    Let,
    Level,
    Map,
    RowReduce,
    Scalar,
    Space,
    Stmt,
    Window,
)
from flashgen.spec import Spec

SCALES = (Scalar("scale_log2", F32), Scalar("scale", F32))
Q_AXES = (Axis("q_block", ceil_div(SEQLEN_Q, BLOCK_Q)), Axis("head", HEADS), Axis("batch", BATCHES))


def _dq_accumulator() -> Buffer:
    shape = ("batches", "heads", "seqlen_q_padded", "head_dim")
    return Buffer("dq_workspace", shape, F32, Space.GLOBAL, layout_of="dq_acc")


@of_sequences
def delta(spec: Spec) -> Kernel:
    """Preprocess: delta = rowsum(dO * O) - dlse, lse in base 2 (+inf for rows without keys, so that P = 0)."""
    zero_dq = () if spec.deterministic else (Fill(parts.rows_of("dq_workspace", HEAD, Q_START), Const(0.0)),)
    accumulator = () if spec.deterministic else (_dq_accumulator(), parts.register("dq_acc", "block_q", "head_dim"))
    lse = load("lse_row", I)
    no_part = lse.equals(NEG_INF)
    # A score may make anything of the zeros of rows behind the end; the sums of sinks go through all rows there are.
    if spec.score is not None or (spec.sinks is not None and spec.varlen):
        no_part = no_part | (Q_START + I >= SEQLEN_Q)
    return Kernel(
        name="attention_delta",
        level=Level.TILE,
        scalars=parts.SIZES,
        axes=Q_AXES,
        buffers=(
            parts.tensor("o", spec, "seqlen_q", "head_dim_v"),
            parts.tensor("dout", spec, "seqlen_q", "head_dim_v"),
            *(parts.vector(name) for name in ("lse", "dlse")),
            *(parts.vector(name, "seqlen_q_padded") for name in ("lse_log2", "delta")),
            parts.shared("o_tile", spec, "block_q", "head_dim_v"),
            parts.shared("dout_tile", spec, "block_q", "head_dim_v"),
            parts.register("product", "block_q", "head_dim_v"),
            *(parts.register(name, "block_q") for name in ("delta_row", "lse_row", "dlse_row", "lse_log2_row")),
            *accumulator,
        ),
        body=(
            Let("q_start", Q_BLOCK * BLOCK_Q),
            Copy("o_tile", parts.rows_of("o", HEAD, Q_START)),
            Copy("dout_tile", parts.rows_of("dout", HEAD, Q_START)),
            *zero_dq,
            Copy("lse_row", parts.rows_of("lse", HEAD, Q_START)),
            Copy("dlse_row", parts.rows_of("dlse", HEAD, Q_START)),
            Map("product", load("o_tile", I, J) * load("dout_tile", I, J)),
            Fill("delta_row", Const(0.0)),
            RowReduce("delta_row", "sum", "product"),
            Map("delta_row", load("delta_row", I) - load("dlse_row", I)),
            Map("lse_log2_row", select(no_part, INF, lse * Const(math.log2(math.e)))),
            Copy(parts.rows_of("delta", HEAD, Q_START), "delta_row"),
            Copy(parts.rows_of("lse_log2", HEAD, Q_START), "lse_log2_row"),
        ),
    )


@of_sequences
def backward(spec: Spec) -> Kernel:
    """dK and dV of a block of keys, and its share of dQ unless the spec is deterministic."""
    return Kernel(
        name="attention_backward",
        level=Level.TILE,
        scalars=(*parts.SIZES, *SCALES, *dropout.scalars(spec), *tiles.scalars(spec)),
        axes=(
            Axis("kv_block", ceil_div(SEQLEN_K, BLOCK_KV)),
            Axis("head_kv", HEADS_KV),
            Axis("batch", BATCHES),
        ),
        buffers=_backward_buffers(spec),
        body=(
            Let("kv_start", KV_BLOCK * BLOCK_KV),
            Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
            Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),
            Fill("dk_acc", Const(0.0)),
            Fill("dv_acc", Const(0.0)),
            *_steps(spec),
            Map("dk_out", Cast(spec.dtype, load("dk_acc", I, J) * SCALE)),
            Map("dv_out", Cast(spec.dtype, load("dv_acc", I, J) * (dropout.KEEP_SCALE if spec.dropout else 1))),
            Copy("dk_tile", "dk_out"),
            Copy("dv_tile", "dv_out"),
            Copy(parts.rows_of("dk", HEAD_KV, KV_START), "dk_tile"),
            Copy(parts.rows_of("dv", HEAD_KV, KV_START), "dv_tile"),
        ),
    )


def _backward_buffers(spec: Spec) -> tuple[Buffer, ...]:
    half = spec.dtype
    dq: tuple[Buffer, ...] = (_dq_accumulator(), parts.shared("ds_tile", spec, "block_kv", "block_q"))
    dq += (parts.register("dq_acc", "block_q", "head_dim"),)
    return (
        parts.tensor("q", spec, "seqlen_q", "head_dim"),
        parts.tensor("k", spec, "seqlen_k", "head_dim"),
        parts.tensor("v", spec, "seqlen_k", "head_dim_v"),
        parts.tensor("dout", spec, "seqlen_q", "head_dim_v"),
        parts.vector("lse_log2", "seqlen_q_padded"),
        parts.vector("delta", "seqlen_q_padded"),
        parts.tensor("dk", spec, "seqlen_k", "head_dim"),
        parts.tensor("dv", spec, "seqlen_k", "head_dim_v"),
        parts.shared("q_tile", spec, "block_q", "head_dim"),
        parts.shared("dout_tile", spec, "block_q", "head_dim_v"),
        Buffer("lse_tile", ("block_q",), F32, Space.SHARED),
        Buffer("delta_tile", ("block_q",), F32, Space.SHARED),
        *tiles.buffers(spec),
        parts.shared("k_tile", spec, "block_kv", "head_dim"),
        parts.shared("v_tile", spec, "block_kv", "head_dim_v"),
        parts.shared("dk_tile", spec, "block_kv", "head_dim"),
        parts.shared("dv_tile", spec, "block_kv", "head_dim_v"),
        *(parts.register(name, "block_kv", "block_q") for name in ("s", "p", "dp", "ds")),
        *_slope_tile(spec, "block_kv", "block_q"),
        *(parts.register(name, "block_kv", "block_q", dtype=half) for name in ("p_operand", "ds_operand")),
        parts.register("dk_acc", "block_kv", "head_dim"),
        parts.register("dv_acc", "block_kv", "head_dim_v"),
        parts.register("dk_out", "block_kv", "head_dim", dtype=half),
        parts.register("dv_out", "block_kv", "head_dim_v", dtype=half),
        *(() if spec.deterministic else dq),
        *parts.arrays(spec),
        *((lists.QUERIES,) if spec.listed else ()),
    )


def _steps(spec: Spec) -> tuple[Stmt, ...]:
    """The blocks of queries of each head of the group: all of them, or those that are listed for the block of keys."""
    if spec.listed:
        return lists.over_queries(_step(spec))
    place = (Let("head", HEAD_KV * GROUP + Var("head_in_group")), Let("q_start", Q_BLOCK * BLOCK_Q))
    blocks = For("q_block", Const(0), ceil_div(SEQLEN_Q, BLOCK_Q), (*place, *_step(spec)))
    return (For("head_in_group", Const(0), GROUP, (blocks,)),)


def _step(spec: Spec) -> tuple[Stmt, ...]:
    """One block of queries of one head."""
    head: Expr = Var("head")
    weighted = _weighted(spec, transposed=True)
    return (
        Copy("q_tile", parts.rows_of("q", head, Q_START)),
        Copy("lse_tile", parts.rows_of("lse_log2", head, Q_START)),
        *parts.tile_copies(spec),
        Copy("dout_tile", parts.rows_of("dout", head, Q_START)),
        Copy("delta_tile", parts.rows_of("delta", head, Q_START)),
        Gemm("s", "k_tile", "q_tile", transpose_b=True, note="keys are rows: s is the transpose of Q K^T"),
        *_scored(spec, transposed=True),
        parts.masked(spec, transposed=True, queries=not parts.stays_finite(spec)),
        Map("p", exp2(load("s", I, J) * parts.exponent(spec) - load("lse_tile", J))),
        *dropout.marked(spec),
        Gemm("dp", "v_tile", "dout_tile", transpose_b=True),
        Map("p_operand", Cast(spec.dtype, dropout.without_dropped(spec))),
        *dropout.before_weights(spec, weighted),
        *weighted,
        Gemm("dv_acc", "p_operand", "dout_tile", accumulate=True),
        Map("ds", dropout.gradient(spec, load("delta_tile", J), weighted)),
        Map("ds_operand", Cast(spec.dtype, load("ds", I, J))),
        *(() if spec.deterministic else (Copy("ds_tile", "ds_operand", note="dQ needs every key of the block"),)),
        Gemm("dk_acc", "ds_operand", "q_tile", accumulate=True),
        *(() if spec.deterministic else _dq_step(head)),
    )


def _scored(spec: Spec, transposed: bool = False) -> tuple[Stmt, ...]:
    """The score function, and before it its derivative where that depends on the score."""
    if spec.score is None:
        return ()
    slope = (Map("slope", parts.slope(spec, transposed), note="the derivative of what follows"),)
    scored = Map("s", parts.scored(spec, transposed), note=spec.score.name)
    return (*(slope if _has_slope(spec) else ()), scored)


def _weighted(spec: Spec, transposed: bool = False) -> tuple[Stmt, ...]:
    """P times the derivative of the score function."""
    factor = load("slope", I, J) if _has_slope(spec) else parts.slope(spec, transposed)
    return () if factor == Const(1.0) else (Map("p", parts.weighted(spec, factor), note="by the score function"),)


def _has_slope(spec: Spec) -> bool:
    """True where the derivative of the score function depends on the score."""
    return load("s", I, J) in walk(parts.slope(spec))


def _slope_tile(spec: Spec, *shape: str) -> tuple[Buffer, ...]:
    return (parts.register("slope", *shape),) if _has_slope(spec) else ()


def _dq_step(head: Expr) -> tuple[Stmt, ...]:
    return (
        Gemm("dq_acc", "ds_tile", "k_tile", transpose_a=True),
        Accumulate(
            parts.rows_of("dq_workspace", head, Q_START), "dq_acc", note="other blocks of keys add to the same rows"
        ),
    )


@of_sequences
def convert_dq(spec: Spec) -> Kernel:
    """Postprocess: dq = scale * accumulator, in the storage type."""
    return Kernel(
        name="attention_convert_dq",
        level=Level.TILE,
        scalars=(*parts.SIZES, *SCALES),
        axes=Q_AXES,
        buffers=(
            _dq_accumulator(),
            parts.tensor("dq", spec, "seqlen_q", "head_dim"),
            parts.register("dq_acc", "block_q", "head_dim"),
            parts.register("dq_out", "block_q", "head_dim", dtype=spec.dtype),
            parts.shared("dq_tile", spec, "block_q", "head_dim"),
        ),
        body=(
            Let("q_start", Q_BLOCK * BLOCK_Q),
            Copy("dq_acc", parts.rows_of("dq_workspace", HEAD, Q_START)),
            *_store_dq(spec),
        ),
    )


def _store_dq(spec: Spec) -> tuple[Stmt, ...]:
    return (
        Map("dq_out", Cast(spec.dtype, load("dq_acc", I, J) * SCALE)),
        Copy("dq_tile", "dq_out"),
        Copy(parts.rows_of("dq", HEAD, Q_START), "dq_tile"),
    )


@of_sequences
def backward_dq(spec: Spec) -> Kernel:
    """dQ of a block of queries, for the deterministic backward."""
    axes = (Axis("q_block", ceil_div(SEQLEN_Q, BLOCK_Q), longest_first=parts.longest_first(spec)), *Q_AXES[1:])
    return Kernel(
        name="attention_backward_dq",
        level=Level.TILE,
        scalars=(*parts.SIZES, *SCALES, *dropout.scalars(spec), *tiles.scalars(spec)),
        axes=axes,
        buffers=_backward_dq_buffers(spec),
        body=(
            Let("head_kv", HEAD // GROUP),
            Let("q_start", Q_BLOCK * BLOCK_Q),
            Copy("q_tile", parts.rows_of("q", HEAD, Q_START)),
            Copy("dout_tile", parts.rows_of("dout", HEAD, Q_START)),
            Copy("lse_row", Window("lse_log2", (Var("batch"), HEAD, Q_START))),
            Copy("delta_row", Window("delta", (Var("batch"), HEAD, Q_START))),
            Fill("dq_acc", Const(0.0)),
            *parts.over_keys(spec, HEAD, _dq_only_step(spec)),
            *_store_dq(spec),
        ),
    )


def _backward_dq_buffers(spec: Spec) -> tuple[Buffer, ...]:
    return (
        parts.tensor("q", spec, "seqlen_q", "head_dim"),
        parts.tensor("k", spec, "seqlen_k", "head_dim"),
        parts.tensor("v", spec, "seqlen_k", "head_dim_v"),
        parts.tensor("dout", spec, "seqlen_q", "head_dim_v"),
        parts.vector("lse_log2"),
        parts.vector("delta"),
        parts.tensor("dq", spec, "seqlen_q", "head_dim"),
        parts.shared("q_tile", spec, "block_q", "head_dim"),
        parts.shared("dout_tile", spec, "block_q", "head_dim_v"),
        parts.shared("k_tile", spec, "block_kv", "head_dim"),
        parts.shared("v_tile", spec, "block_kv", "head_dim_v"),
        *tiles.buffers(spec),
        parts.shared("dq_tile", spec, "block_q", "head_dim"),
        *(parts.register(name, "block_q") for name in ("lse_row", "delta_row")),
        *(parts.register(name, "block_q", "block_kv") for name in ("s", "p", "dp", "ds")),
        *_slope_tile(spec, "block_q", "block_kv"),
        parts.register("ds_operand", "block_q", "block_kv", dtype=spec.dtype),
        parts.register("dq_acc", "block_q", "head_dim"),
        parts.register("dq_out", "block_q", "head_dim", dtype=spec.dtype),
        *parts.arrays(spec),
        *((lists.KEYS,) if spec.listed else ()),
    )


def _dq_only_step(spec: Spec) -> tuple[Stmt, ...]:
    """One block of keys."""
    return (
        Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
        *parts.tile_copies(spec),
        Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),
        Gemm("s", "q_tile", "k_tile", transpose_b=True),
        *_scored(spec),
        parts.masked(spec),
        Map("p", exp2(load("s", I, J) * parts.exponent(spec) - load("lse_row", I))),
        Gemm("dp", "dout_tile", "v_tile", transpose_b=True),
        *_weighted(spec),
        *dropout.gradient_dropped(spec),
        Map("ds", load("p", I, J) * (load("dp", I, J) - load("delta_row", I))),
        Map("ds_operand", Cast(spec.dtype, load("ds", I, J))),
        Gemm("dq_acc", "ds_operand", "k_tile", accumulate=True),
    )
