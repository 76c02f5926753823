"""What the attention nests share: the global tensors, the mask, the scalars."""

from __future__ import annotations

from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import Expr, I, J, Var
from flashgen.ir.nodes import Axis, Buffer, Scalar, Space, Window
from flashgen.spec import Spec

BATCH, HEAD, HEAD_KV, HEAD_BLOCK = Var("batch"), Var("head"), Var("head_kv"), Var("head_block")
Q_BLOCK, KV_BLOCK = Var("q_block"), Var("kv_block")
Q_START, KV_START = Var("q_start"), Var("kv_start")
BLOCK_Q, BLOCK_KV = Var("block_q"), Var("block_kv")
SEQLEN_Q, SEQLEN_K = Var("seqlen_q"), Var("seqlen_k")
HEADS, HEADS_KV, BATCHES, GROUP = Var("heads"), Var("heads_kv"), Var("batches"), Var("group")
SCALE, SCALE_LOG2 = Var("scale"), Var("scale_log2")

SIZES = (
    Scalar("seqlen_q", I32),
    Scalar("seqlen_k", I32),
    Scalar("heads", I32),
    Scalar("heads_kv", I32),
    Scalar("group", I32),
    Scalar("batches", I32),
)


def tensor(name: str, spec: Spec, seqlen: str, head_dim: str) -> Buffer:
    """A global (batch, heads, seqlen, head_dim) tensor of the storage type; strides are run-time arguments."""
    return Buffer(name, ("batches", "heads", seqlen, head_dim), spec.dtype, Space.GLOBAL)


def vector(name: str, seqlen: str = "seqlen_q") -> Buffer:
    """A global (batch, heads, seqlen) float32 tensor."""
    return Buffer(name, ("batches", "heads", seqlen), F32, Space.GLOBAL)


def shared(name: str, spec: Spec, rows: str, cols: str) -> Buffer:
    """A tile of the storage type in shared memory."""
    return Buffer(name, (rows, cols), spec.dtype, Space.SHARED)


def register(name: str, *shape: str, dtype=F32) -> Buffer:
    """A tile or a row vector in registers, spread over the threads of the block."""
    return Buffer(name, shape, dtype, Space.REGISTER)


def rows_of(buffer: str, head: Expr, start: Expr, heads: int = 1) -> Window:
    """The tile of a tensor that starts at a row; where packed, the rows of several heads."""
    return Window(buffer, (BATCH, head, start), heads)


def positions(spec: Spec) -> Expr:
    """Queries of each head in a tile of queries."""
    return BLOCK_Q // spec.packed


def head_axis(spec: Spec) -> Axis:
    """The grid axis of the query heads, or of blocks of them where several share a tile."""
    return Axis("head", HEADS) if spec.packed == 1 else Axis(HEAD_BLOCK.name, HEADS // spec.packed)


def visible(spec: Spec, transposed: bool = False) -> Expr:
    """Which elements of a score tile take part: keys that exist and, for causal, are not in the query's future.

    Rows of the tile are queries (where packed, those of one head after those of another) and columns keys, or the other
    way round where the tile is transposed.
    """
    row = J if transposed else I
    q_idx = Q_START + (row if spec.packed == 1 else row % positions(spec))
    kv_idx = KV_START + (I if transposed else J)
    mask = kv_idx < SEQLEN_K
    if spec.causal:
        mask = mask & (kv_idx <= q_idx + (SEQLEN_K - SEQLEN_Q))
    return mask
