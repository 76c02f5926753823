"""Attention sinks: a logit for each head that takes part in the denominator of its rows, and in nothing else.

With t the sink of a head:
    P_ij = exp(s_ij) / (sum_j exp(s_ij) + exp(t))     lse_i = log(sum_j exp(s_ij) + exp(t))     O = P V
so that P = exp(s - lse) as without it, and the backward of q, k and v is the same. The gradient of a sink follows from
d lse_i / d t = exp(t - lse_i) and d P_ij / d t = -P_ij exp(t - lse_i), with delta = rowsum(dO * O) - dlse:
    dt = sum_i (dlse_i - dO_i O_i) exp(t - lse_i) = -sum_i exp(t - lse_i) delta_i

`epilogue`: what the forward does with the sums of its rows. A row without keys has O = 0 and LSE = t.
`partial_sums`: of stretches of rows, from the vectors that attention_delta leaves; a stretch is a row of a tile.
Packed sequences are one with all rows of the vectors, of which those of no sequence have an LSE of +inf there.
`gradient`: the sum of these for each head. Both add in a fixed order.
"""

from __future__ import annotations

import math

from flashgen.attention import parts
from flashgen.attention.parts import (
    BATCHES,
    BLOCK_KV,
    BLOCK_Q,
    HEAD,
    HEADS,
    SEQLEN_Q,
)
from flashgen.attention.varlen import of_totals, workspace_rows
from flashgen.ir.dtype import F32
from flashgen.ir.expr import INF, Const, Expr, I, J, Var, ceil_div, exp2, load, log, maximum, select
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
    Stmt,
    Window,
)
from flashgen.spec import Spec

NAMES = ("attention_sink_sums", "attention_dsinks")
LOG2_E = Const(math.log2(math.e))
STRETCHES, FIRST = Var("stretches"), Var("first_stretch")


def registers() -> tuple[Buffer, ...]:
    """What the forward's epilogue takes beside: the sink of each row, the larger offset, the denominator."""
    return tuple(parts.register(name, "block_q") for name in ("sink", "sink_offset", "denominator"))


def epilogue(spec: Spec) -> tuple[Stmt, ...]:
    """`inverse` and `lse_row` of each row, from `offset` and `row_sum`.

    Of offset and sink the larger one is the new offset: neither exponential overflows, however far apart they are.
    """
    head: Expr = HEAD if spec.packed == 1 else HEAD + I // parts.positions(spec)
    empty = load("row_sum", I).equals(0.0)
    kept = exp2(load("offset", I) - load("sink_offset", I))
    added = exp2(load("sink", I) * LOG2_E - load("sink_offset", I))
    lse = load("sink_offset", I) * math.log(2.0) + log(load("denominator", I))
    return (
        Map("sink", load("sinks", head), note="of the head: it takes part in the denominator alone"),
        Map("sink_offset", maximum(load("offset", I), load("sink", I) * LOG2_E)),
        Map("denominator", load("row_sum", I) * kept + added),
        Map("inverse", select(empty, 0.0, kept / load("denominator", I)), note="rows without keys give O = 0"),
        Map("lse_row", select(empty, load("sink", I), lse)),
    )


def partial_sums(spec: Spec) -> Kernel:
    """Of each stretch of block_kv rows of one head and batch, the sum of exp(sink - lse) * delta."""
    row = FIRST + I
    batch, q_idx = row // Var("per_sequence"), row % Var("per_sequence") * BLOCK_KV + J
    lse, delta = (load(name, batch, HEAD, q_idx) for name in ("lse_log2", "delta"))
    takes_part = (row < STRETCHES) & (q_idx < _rows(spec)) & (lse < INF)
    return Kernel(
        name=NAMES[0],
        level=Level.TILE,
        scalars=_sizes(spec),
        axes=(Axis("stretch_block", ceil_div(_sequences(spec) * _per_sequence(spec), BLOCK_Q)), Axis("head", HEADS)),
        buffers=(
            *(_elements(name, "batches", "heads", "seqlen_q_padded") for name in ("lse_log2", "delta")),
            Buffer("sink_sums", ("one", "heads", "stretches"), F32, Space.GLOBAL),
            *parts.sinks(spec),
            parts.register("part", "block_q", "block_kv"),
            parts.register("part_sum", "block_q"),
        ),
        body=(
            Let("per_sequence", _per_sequence(spec), note="stretches of block_kv queries"),
            Let("stretches", _sequences(spec) * Var("per_sequence")),
            Let("first_stretch", Var("stretch_block") * BLOCK_Q),
            Map("part", select(takes_part, exp2(load("sinks", HEAD) * LOG2_E - lse) * delta, 0.0)),
            Fill("part_sum", Const(0.0)),
            RowReduce("part_sum", "sum", "part"),
            Copy(Window("sink_sums", (Const(0), HEAD, FIRST)), "part_sum"),
        ),
    )


def gradient(spec: Spec) -> Kernel:
    """The gradient of each sink: of its head's partial sums, the sum with its sign changed."""
    step = (
        Let("first_stretch", Var("stretch_block") * BLOCK_KV),
        Map("part", select(FIRST + J < STRETCHES, load("sink_sums", Const(0), Var("first_head") + I, FIRST + J), 0.0)),
        RowReduce("dsink_row", "sum", "part"),
    )
    return Kernel(
        name=NAMES[1],
        level=Level.TILE,
        scalars=_sizes(spec),
        axes=(Axis("head_block", ceil_div(HEADS, BLOCK_Q)),),
        buffers=(
            _elements("sink_sums", "one", "heads", "stretches"),
            Buffer("dsinks", ("one", "one", "heads"), F32, Space.GLOBAL),
            parts.register("part", "block_q", "block_kv"),
            parts.register("dsink_row", "block_q"),
        ),
        body=(
            Let("stretches", _sequences(spec) * _per_sequence(spec)),
            Let("first_head", Var("head_block") * BLOCK_Q),
            Fill("dsink_row", Const(0.0)),
            For("stretch_block", Const(0), ceil_div(STRETCHES, BLOCK_KV), step),
            Map("dsink_row", 0.0 - load("dsink_row", I)),
            Copy(Window("dsinks", (Const(0), Const(0), Var("first_head"))), "dsink_row"),
        ),
    )


def _sizes(spec: Spec) -> tuple[Scalar, ...]:
    return of_totals(parts.SIZES) if spec.varlen else parts.SIZES


def _sequences(spec: Spec) -> Expr:
    """Sequences in the vectors: packed ones are one."""
    return Const(1) if spec.varlen else BATCHES


def _rows(spec: Spec) -> Expr:
    """Rows of each of these."""
    return workspace_rows() if spec.varlen else SEQLEN_Q


def _per_sequence(spec: Spec) -> Expr:
    return ceil_div(_rows(spec), BLOCK_KV)


def _elements(name: str, *shape: str) -> Buffer:
    return Buffer(name, shape, F32, Space.GLOBAL, by_element=True)
