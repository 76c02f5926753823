"""What the attention nests share: the global tensors, the mask, the score function, the scalars."""

from __future__ import annotations

import math

from flashgen import masks, trace
from flashgen.attention import lists, tiles
from flashgen.calculus import affine, derivative, grows, tame, without_signs
from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import (
    NEG_INF,
    Binary,
    Cast,
    Const,
    Expr,
    I,
    J,
    Unary,
    Var,
    by_element,
    ceil_div,
    conjuncts,
    load,
    rebuild,
    select,
    substitute,
    variables,
)
from flashgen.ir.nodes import Axis, Buffer, For, Let, Map, Scalar, Space, Stmt, Window
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


def arrays(spec: Spec) -> tuple[Buffer, ...]:
    """What the mask and the score function of the spec read. They come behind the other global arrays."""
    by_tiles = tiles.of(spec)
    return tuple(
        tiles.whole(item)
        if item in by_tiles
        else Buffer(item.name, ("any",) * item.rank, item.dtype, Space.GLOBAL, by_element=True)
        for item in spec.arrays
    )


def sinks(spec: Spec) -> tuple[Buffer, ...]:
    """The sink of each head, where the spec has them. It comes behind what functions read."""
    return () if spec.sinks is None else (Buffer("sinks", ("any",), spec.sinks, Space.GLOBAL, by_element=True),)


def rows_of(buffer: str, head: Expr, start: Expr, heads: int = 1) -> Window:
    """The tile of a tensor that starts at a row; where packed, the rows of several heads."""
    return Window(buffer, (BATCH, head, start), heads)


def positions(spec: Spec) -> Expr:
    """Queries of each head in a tile of queries."""
    return BLOCK_Q // spec.packed


def head_axis(spec: Spec) -> Axis:
    """The grid axis of the query heads, or of blocks of them where several share a tile."""
    return Axis("head", HEADS) if spec.packed == 1 else Axis(HEAD_BLOCK.name, HEADS // spec.packed)


def masked(spec: Spec, transposed: bool = False, queries: bool = False) -> Stmt:
    """The scores of hidden elements become -inf; of a listed block only where its entry says that there are some."""
    expr = select(visible(spec, transposed, queries), load("s", I, J), NEG_INF)
    return lists.masked(expr) if spec.listed else Map("s", expr, note="mask")


def tile_copies(spec: Spec) -> tuple[Stmt, ...]:
    """The tiles that the score function reads at a step."""
    return tuple(tiles.copies(spec, {"b": BATCH, "h": HEAD}, (Q_START, KV_START)))


def over_keys(spec: Spec, head: Expr, step: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The step for each block of keys: all of them, or those listed for a block of queries; head: the list's."""
    if spec.listed:
        return lists.over_keys(head, step)
    start = Let("kv_start", KV_BLOCK * BLOCK_KV)
    return (For("kv_block", Const(0), ceil_div(SEQLEN_K, BLOCK_KV), (start, *step)),)


CAUSAL = trace.mask(masks.causal)
ELEMENTS = {"score", "q_idx", "kv_idx"}  # what differs from element to element, of the arguments of a function
INTEGERS = {"b", "h", "q_idx", "kv_idx", "seqlen_q", "seqlen_k"}


def visible(spec: Spec, transposed: bool = False, queries: bool = False) -> Expr:
    """Which elements of a score tile take part: keys that exist and that the masks of the spec show to the query.

    Rows of the tile are queries (where packed, those of one head after those of another) and columns keys, or the other
    way round where the tile is transposed. queries: of queries only those that exist.
    """
    arguments = arguments_of(spec, transposed)
    mask: Expr = arguments["kv_idx"] < SEQLEN_K
    if queries:
        mask = mask & (arguments["q_idx"] < SEQLEN_Q)
    for part in shown(spec):
        mask = mask & substitute(part, arguments)
    return mask


def shown(spec: Spec) -> list[Expr]:
    """The conditions under which the masks of the spec show a key to a query, by the arguments of functions."""
    masks = (CAUSAL if spec.causal else None, spec.mask)
    return [part for mask in masks if mask is not None for part in conjuncts(mask.expr)]


def arguments_of(spec: Spec, transposed: bool) -> dict[str, Expr]:
    """What the arguments of mask and score functions are for the element (i, j) of the scores."""
    row: Expr = J if transposed else I
    head: Expr = HEAD
    if spec.packed > 1:
        row, head = row % positions(spec), HEAD + row // positions(spec)
    kv_idx = KV_START + (I if transposed else J)
    return {"b": BATCH, "h": head, "q_idx": Q_START + row, "kv_idx": kv_idx, "score": load("s", I, J) * SCALE}


def longest_first(spec: Spec) -> bool:
    """True where later blocks of queries see more keys. Lists, and batches whose keys are counted, may have any number
    of them: blocks then ask for their tiles."""
    return (
        spec.listed
        or (spec.used and not spec.varlen)
        or grows(substitute(visible(spec), {"kv_start": KV_BLOCK * BLOCK_KV}), "kv_block", Q_START.name)
    )


def exponent(spec: Spec) -> Expr:
    """What a score is multiplied by for exponentials of base 2: by the scale too, where no function has taken it."""
    return SCALE_LOG2 if spec.score is None else Const(math.log2(math.e))


def scored(spec: Spec, transposed: bool = False) -> Expr:
    """What the score function makes of the element (i, j) of s, a product of query and key."""
    assert spec.score is not None
    return of_element(without_signs(spec.score.expr, shown(spec), INTEGERS, "score"), spec, transposed)


def slope(spec: Spec, transposed: bool = False) -> Expr:
    """The derivative of the score function by the scaled score."""
    if spec.score is None:
        return Const(1.0)
    return of_element(derivative(spec.score.expr, "score"), spec, transposed)


def of_index(expr: Expr, spec: Spec, transposed: bool = False) -> Expr:
    """An index as a score function has it, for the element (i, j); for row i where it does not depend on j."""
    return substitute(expr, arguments_of(spec, transposed))


def stays_finite(spec: Spec) -> bool:
    """True where scores of queries that do not exist are finite too."""
    return spec.score is None or tame(spec.score.expr, ELEMENTS)


def weighted(spec: Spec, factor: Expr) -> Expr:
    """P times the slope: 0 where P is 0, though the slope of a masked score may be infinite."""
    p = load("p", I, J)
    if spec.score is None or tame(derivative(spec.score.expr, "score"), ELEMENTS, negative_infinity=False):
        return p * factor
    return select(p > 0.0, p * factor, 0.0)


def of_element(expr: Expr, spec: Spec, transposed: bool = False) -> Expr:
    """An expression over the arguments of a score function, for the element (i, j).

    Where queries are columns the compiler would spill for sums of floats.
    """
    expr = substitute(tiles.read(expr, spec, transposed), arguments_of(spec, transposed))
    return _gathered(expr if transposed else _in_floats(expr))


def _in_floats(expr: Expr) -> Expr:
    """float(row + column) as float(row) + float(column), which is the same below 2^24.

    A conversion takes as long as an exponential. That of a row is one for all its columns, that of a column a constant.
    """
    match rebuild(expr, _in_floats):
        case Cast(dtype, Unary("abs", x)):
            return Unary("abs", _in_floats(Cast(dtype, x)))
        case Cast(dtype, x) as whole if J.name in variables(x):
            try:
                terms, row = affine(x, {J.name})
            except ValueError:
                return whole
            column = Cast(dtype, J * terms[J.name].factor)
            return Cast(dtype, row) + column if terms[J.name].sign > 0 else Cast(dtype, row) - column
        case other:
            return other


def _gathered(expr: Expr) -> Expr:
    """(x * u) * v as x * (u * v) where u and v are the same for all elements of a tile: one product is left."""
    expr = rebuild(expr, _gathered)
    match expr:
        case Binary("*", Binary("*", x, u), v) if _same(u) and _same(v):
            return x * (u * v)
    return expr


def _same(expr: Expr) -> bool:
    return not by_element(expr)
