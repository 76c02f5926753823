"""Packed sequences: a loop nest over sequences of one length becomes one over sequences that follow each other.

Sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] of arrays (total, heads, head_dim). Blocks of rows are
numbered through all sequences, from cu_seqlens[b] // rows + b on in sequence b. So a block finds its sequence by a
binary search; no kernel has to sum up how many blocks each sequence has, and the host need not know it. The numbers
leave gaps, at most one a sequence: a block in a gap finds that it lies behind the end of its sequence, and has nothing
to walk over.

The float32 workspaces of the backward have room for whole blocks by the same rule (FlashAttention's), of `padding`
rows. Everything else of a nest stays as it is: seqlen_q, seqlen_k and `batch` become integers that a block finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from flashgen.attention.lengths import USED, of_used_keys
from flashgen.attention.parts import BATCH, BATCHES
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Const, Expr, Search, Var, ceil_div, load, minimum, select, variables
from flashgen.ir.nodes import Axis, Buffer, Kernel, Let, Scalar, Space, Stmt, Window, name_of
from flashgen.ir.visit import Body, heads_in_tile, rewrite_kernel, statements
from flashgen.spec import Spec

ROW_BLOCK, PADDING, WORKSPACE_BEGIN = Var("row_block"), Var("padding"), Var("workspace_begin")
OFFSETS = {"q": "cu_seqlens_q", "k": "cu_seqlens_k"}
ARRAYS = (*OFFSETS.values(), USED)
WORKSPACES = ("lse_log2", "delta", "dq_workspace")


def of_sequences(nest: Callable[[Spec], Kernel]) -> Callable[[Spec], Kernel]:
    """The loop nest as it is, or for packed sequences, or padded ones, where the spec has these."""

    @wraps(nest)
    def made(spec: Spec) -> Kernel:
        return with_lengths(nest(spec), spec)

    return made


def with_lengths(kernel: Kernel, spec: Spec) -> Kernel:
    """The kernel for what the spec has: packed sequences, padded ones, or sequences of one length."""
    if spec.varlen:
        return packed(kernel, spec)
    return of_used_keys(kernel) if spec.used else kernel


def packed(kernel: Kernel, spec: Spec) -> Kernel:
    """The kernel for packed sequences: other axes, windows and sizes around the same body."""
    block_axis, head_axis, _ = kernel.axes
    own = "q" if block_axis.name == "q_block" else "k"
    rows: Expr = Var("block_q") // heads_in_tile(kernel) if own == "q" else Var("block_kv")
    scalars = of_totals(kernel.scalars, any(item.name in WORKSPACES for item in kernel.buffers))
    moved = rewrite_kernel(kernel, lambda stmt: _moved(kernel, stmt, spec)).body
    body = (*_needed(_place(own, rows, block_axis, spec), moved), *moved)
    read = {name_of(place) for stmt in statements(body) for place in stmt.reads()}
    arrays = (Buffer(name, ("any",), I32, Space.GLOBAL, by_element=True) for name in ARRAYS if name in read)
    total = Var(f"total_{own}")
    return kernel.having(
        scalars=scalars,
        axes=(Axis(ROW_BLOCK.name, minimum(total, 1) * (total // rows + BATCHES)), head_axis),  # none without rows
        buffers=(*map(_buffer, kernel.buffers), *arrays),
        body=body,
    )


def of_totals(scalars: tuple[Scalar, ...], workspaces: bool = True) -> tuple[Scalar, ...]:
    """The scalars with totals in place of lengths; of kernels with workspaces, what these are padded to too."""
    renamed = tuple(replace(item, name=item.name.replace("seqlen_", "total_")) for item in scalars)
    return (*renamed, Scalar(PADDING.name, I32)) if workspaces else renamed


def workspace_rows() -> Expr:
    """Rows of a workspace, all of which attention_delta writes; none where there are no queries, and no block of it."""
    total = Var("total_q")
    return minimum(total, 1) * (total // PADDING + BATCHES) * PADDING


def _buffer(buffer: Buffer) -> Buffer:
    """An array without an axis of batches: the sequences are rows of one."""
    if buffer.space is not Space.GLOBAL or buffer.by_element:
        return buffer
    _, heads, rows, *rest = buffer.shape
    rows = "total_q_padded" if buffer.name in WORKSPACES else rows.replace("seqlen_", "total_")
    return replace(buffer, shape=("one", heads, rows, *rest))


def _place(own: str, rows: Expr, axis: Axis, spec: Spec) -> Body:
    """Where the rows of a block lie: its sequence, and its place there. In a gap the other side has no rows."""
    block, seqlen, other = Var(axis.name), Var(f"seqlen_{own}"), "k" if own == "q" else "q"
    lengths = {side: load(name, BATCH + 1) - _begin(side) for side, name in OFFSETS.items()}
    if spec.used:
        lengths["k"] = minimum(load(USED, BATCH), Var("length_k"))
    nth: Expr = ROW_BLOCK - (_begin(own) // rows + BATCH)
    order: Body = (Let(block.name, nth),)
    if axis.longest_first:
        nth, last = Var("nth_block"), ceil_div(seqlen, rows) - 1
        own_order = Let(block.name, select(nth * rows < seqlen, last - nth, nth), note="the longest first")
        order = (Let("nth_block", ROW_BLOCK - (_begin(own) // rows + BATCH)), own_order)
    gap = "a block behind the end of its sequence has nothing to walk over"
    return (
        Let(BATCH.name, Search(OFFSETS[own], BATCHES, rows, ROW_BLOCK), note="the sequence of this block of rows"),
        *(Let(_begin(side).name, load(name, BATCH)) for side, name in OFFSETS.items()),
        *((Let("length_k", load(OFFSETS["k"], BATCH + 1) - _begin("k")),) if spec.used else ()),
        Let(seqlen.name, lengths[own]),
        *order,
        Let(f"seqlen_{other}", select(block * rows < seqlen, lengths[other], 0), note=gap),
        Let(WORKSPACE_BEGIN.name, (_begin("q") // PADDING + BATCH) * PADDING),
    )


def _begin(side: str) -> Var:
    return Var(f"{side}_begin")


def _needed(lets: Body, body: Body) -> Body:
    """Those that the body uses, or one of these."""
    used = {name for stmt in statements(body) for expr in stmt.expressions() for name in variables(expr)}
    kept: list[Stmt] = []
    for stmt in reversed(lets):
        if used & set(stmt.assigns()):
            used |= {name for expr in stmt.expressions() for name in variables(expr)}
            kept.append(stmt)
    return tuple(reversed(kept))


def _moved(kernel: Kernel, stmt: Stmt, spec: Spec) -> Stmt:
    """The statement with its windows moved to their sequence, which ends them."""
    changes = {
        name: _window(kernel, value, name in stmt.READS, spec)
        for name in (*stmt.WRITES, *stmt.READS)
        for value in (getattr(stmt, name),)
        if isinstance(value, Window)
    }
    return replace(stmt, **changes) if changes else stmt  # type: ignore[arg-type]


def _window(kernel: Kernel, window: Window, is_read: bool, spec: Spec) -> Window:
    """Keys end where those that are used do; their gradients, of which the others' are zero, with the sequence.

    A kernel whose blocks are those of the workspaces takes whole ones.
    """
    _, head, row = window.origin
    limit = kernel.buffer(window.buffer).shape[2]
    side = "k" if limit == "seqlen_k" else "q"
    length = Var("length_k" if spec.used and side == "k" and not is_read else f"seqlen_{side}")
    begin = WORKSPACE_BEGIN if window.buffer in WORKSPACES else _begin(side)
    whole = limit.endswith("_padded") or window.buffer == "dq_workspace"
    return replace(window, origin=(Const(0), head, begin + row), rows=None if whole else length - row)
