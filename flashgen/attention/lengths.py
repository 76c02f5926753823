"""Batches padded to one length: of the keys of batch b only the first seqused_k[b] are there.

A loop nest over sequences of one length becomes one whose `seqlen_k` is a number of each batch. Everything made of it
follows: masks, the diagonal of `causal`, windows and functions with `flashgen.seqlen_k` in them, and the blocks of keys
that are walked. What lies behind is not read, whatever it is: a copy of keys ends where they do. Gradients of keys are
stored for all of them, and are zero there: a block of keys behind the last has no query to walk over. Lists of blocks
know nothing of it: what they name behind the used keys is masked.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.attention.lists import WHERE_PARTIAL
from flashgen.attention.parts import BATCH, BLOCK_KV, BLOCK_Q, KV_START, SEQLEN_K, SEQLEN_Q
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Var, ceil_div, load, minimum, select, substitute
from flashgen.ir.nodes import Buffer, For, If, Kernel, Let, Space, Stmt, Window
from flashgen.ir.visit import Body, rewrite_kernel

USED = "seqused_k"
LENGTH_K = Var("length_k")  # rows of k and v
QUERIES = Var("queries")
KEYS = ("k", "v")


def of_used_keys(kernel: Kernel) -> Kernel:
    """The kernel where only some keys of each batch are used; one that reads no keys as it is."""
    if not any(item.name in KEYS for item in kernel.buffers):
        return kernel
    kernel = rewrite_kernel(kernel, _within_length)
    own = Let(SEQLEN_K.name, minimum(load(USED, BATCH), LENGTH_K), note="of this batch")
    whole = {SEQLEN_K.name: LENGTH_K}
    return kernel.having(
        scalars=tuple(
            replace(item, name=LENGTH_K.name if item.name == SEQLEN_K.name else item.name) for item in kernel.scalars
        ),
        axes=tuple(replace(axis, extent=substitute(axis.extent, whole)) for axis in kernel.axes),
        buffers=(*map(_buffer, kernel.buffers), Buffer(USED, ("any",), I32, Space.GLOBAL, by_element=True)),
        body=(own, *kernel.body),
    )


def batch_rows(array: str) -> str:
    """The scalar with the rows from batch to batch of k or v, where rows are counted through all batches."""
    return f"{array}_batch_rows"


def _buffer(buffer: Buffer) -> Buffer:
    return replace(buffer, shape=tuple(LENGTH_K.name if dim == SEQLEN_K.name else dim for dim in buffer.shape))


def _within_length(stmt: Stmt) -> Stmt | Body:
    """Copies of keys end with those that are used; a block of keys behind these has no queries."""
    source = getattr(stmt, "src", None)
    if isinstance(source, Window) and source.buffer in KEYS:
        return replace(stmt, src=replace(source, rows=SEQLEN_K - source.origin[2]))  # type: ignore[call-arg]
    if isinstance(stmt, For) and stmt.axis == "head_in_group":
        own = Let(QUERIES.name, select(KV_START < SEQLEN_K, SEQLEN_Q, 0), note="keys that are not used have none")
        return own, replace(stmt, body=tuple(map(_over_queries, stmt.body)))
    if isinstance(stmt, For) and stmt.axis == "q_step":
        return replace(stmt, stop=select(KV_START < SEQLEN_K, stmt.stop, 0), note="keys that are not used have none")
    if isinstance(stmt, If) and stmt.condition == WHERE_PARTIAL:
        return replace(stmt, condition=stmt.condition | (KV_START + BLOCK_KV > SEQLEN_K), note="or end with the keys")
    return stmt


def _over_queries(stmt: Stmt) -> Stmt:
    return replace(stmt, stop=ceil_div(QUERIES, BLOCK_Q)) if isinstance(stmt, For) else stmt
