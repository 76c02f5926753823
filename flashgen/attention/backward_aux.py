"""The gradient of an array that a score function reads, as loop nests of their own.

With s' = f(scale * q k^T, ...) and dS' = P * (dP - delta), the gradient of the loss by s', an element t[...] gets

    d loss / d t[index] = sum of dS' * (d f / d load) over the elements of the scores whose load has that index

in float32. Each load of an array (each index that it is read at) is a `Part`, with a kernel of its own that computes S
and dP once more. Which nest it takes follows from the index:

`rows`: a block of queries of one head walks over the keys. Where the index does not depend on the key, a thread block
    adds up whole rows, and stores them to `sums` (batch, heads, seqlen_q); else each tile goes to its elements.
`columns`: the same of keys that walk over the queries, where the index depends on the key and not on the query; sums
    are (batch, heads, seqlen_k).
`pairs`: a block of queries and one of keys walk over the batch, the heads or both, and add up one tile: an array with
    an element for each pair, of which those that do not depend on the head or the batch are common to all of them.
`diagonals`: tiles at one distance between queries and keys are added up before anything goes to the array: its index
    depends on the two by their difference alone, as in tables of relative positions.

An index is plain where it is made of b, h, q_idx and kv_idx, each at most once, and constants, and the array has all
these elements. Then each is summed by one thread block, or over `sums`, in a fixed order: the gradient repeats bit for
bit. For any other the additions are atomic, in an order that varies. Where that must not be seen they are of integers,
of which the sum is the same in any order: a kernel of its own sums up |g| first, and `unit`, by which g is multiplied,
is such that a sum of all of them just fits into 64 bits.
"""

from __future__ import annotations

from flashgen.attention import dropout, parts, varlen
from flashgen.attention.aux_part import COLUMNS, DIAGONALS, PAIRS, ROWS, Part
from flashgen.attention.parts import (
    BATCHES,
    BLOCK_KV,
    BLOCK_Q,
    GROUP,
    HEAD,
    HEAD_KV,
    HEADS,
    KV_BLOCK,
    KV_START,
    Q_BLOCK,
    Q_START,
    SEQLEN_K,
    SEQLEN_Q,
)
from flashgen.calculus import derivative_by_load, tame
from flashgen.ir.dtype import F32
from flashgen.ir.expr import (
    NEG_INF,
    Const,
    Expr,
    I,
    J,
    Unary,
    Var,
    ceil_div,
    exp2,
    load,
    maximum,
    minimum,
    select,
    text,
    variables,
)
from flashgen.ir.nodes import (
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
    Scatter,
    ScatterAdd,
    Space,
    Stmt,
)
from flashgen.spec import Spec

NAME = "attention_backward_aux"
Q_BLOCKS, KV_BLOCKS = ceil_div(SEQLEN_Q, BLOCK_Q), ceil_div(SEQLEN_K, BLOCK_KV)
DIAGONAL = Var("diagonal")


def backward_aux(spec: Spec, part: Part) -> Kernel:
    """The kernel of one part."""
    kernel = {ROWS: _rows, COLUMNS: _columns, PAIRS: _pairs, DIAGONALS: _diagonals}[part.walk](spec, part)
    return varlen.with_lengths(kernel, spec)


def _rows(spec: Spec, part: Part) -> Kernel:
    axes = (Axis("q_block", Q_BLOCKS, longest_first=parts.longest_first(spec)), *_HEAD_AXES)
    last = _to_elements(spec, part) if part.by_pair else (RowReduce("g_row", "sum", "g"),)
    step = (
        Let("kv_start", KV_BLOCK * BLOCK_KV),
        Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
        Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),
        *_contribution(spec, part, load("lse_row", I), load("delta_row", I)),
        *last,
    )
    body = (
        Let("head_kv", HEAD // GROUP),
        Let("q_start", Q_BLOCK * BLOCK_Q),
        Copy("q_tile", parts.rows_of("q", HEAD, Q_START)),
        Copy("dout_tile", parts.rows_of("dout", HEAD, Q_START)),
        Copy("lse_row", parts.rows_of("lse_log2", HEAD, Q_START)),
        Copy("delta_row", parts.rows_of("delta", HEAD, Q_START)),
        *(() if part.by_pair else (Fill("g_row", Const(0.0)),)),
        For("kv_block", Const(0), KV_BLOCKS, step),
        *(() if part.by_pair else _row_sums(spec, part, Q_START)),
    )
    vectors = [parts.register(name, "block_q") for name in ("lse_row", "delta_row")]
    vectors += [] if part.by_pair else [parts.register("g_row", "block_q")]
    return _kernel(spec, part, axes, ("block_q", "block_kv"), (*vectors, *_target(part, "seqlen_q")), body)


def _columns(spec: Spec, part: Part) -> Kernel:
    """Scores are transposed, so that the sums of keys are those of rows."""
    step = (
        Let("q_start", Q_BLOCK * BLOCK_Q),
        *_load_queries(),
        *_contribution(spec, part, load("lse_tile", J), load("delta_tile", J), transposed=True),
        RowReduce("g_row", "sum", "g"),
    )
    body = (
        Let("head_kv", HEAD // GROUP),
        Let("kv_start", KV_BLOCK * BLOCK_KV),
        Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
        Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),
        Fill("g_row", Const(0.0)),
        For("q_block", Const(0), Q_BLOCKS, step),
        *_row_sums(spec, part, KV_START, transposed=True),
    )
    axes = (Axis("kv_block", KV_BLOCKS), *_HEAD_AXES)
    buffers = (*_VECTOR_TILES, parts.register("g_row", "block_kv"), *_target(part, "seqlen_k"))
    return _kernel(spec, part, axes, ("block_kv", "block_q"), buffers, body)


def _pairs(spec: Spec, part: Part) -> Kernel:
    names = set().union(*map(variables, part.index))
    grid = [axis for axis, name in zip(_HEAD_AXES, "hb", strict=True) if name in names]
    loops = [axis for axis, name in zip(_HEAD_AXES, "hb", strict=True) if name not in names]
    step: tuple[Stmt, ...] = (Let("head_kv", HEAD // GROUP), *_summed_tile(spec, part))
    for axis in loops:
        step = (For(axis.name, Const(0), axis.extent, step),)
    body = (
        Let("q_start", Q_BLOCK * BLOCK_Q),
        Let("kv_start", KV_BLOCK * BLOCK_KV),
        Fill("g", Const(0.0)),
        *step,
        *_to_elements(spec, part),
    )
    axes = (Axis("q_block", Q_BLOCKS), Axis("kv_block", KV_BLOCKS), *grid)
    return _kernel(spec, part, axes, ("block_q", "block_kv"), (*_VECTOR_TILES, *_target(part)), body)


def _diagonals(spec: Spec, part: Part) -> Kernel:
    """Tiles are square, so that an element has the same distance between its query and its key in each of them."""
    blocks_kv, shift = ceil_div(SEQLEN_K, BLOCK_Q), Var("shift")
    step = (
        Let("q_start", Q_BLOCK * BLOCK_Q),
        Let("kv_start", (Q_BLOCK + shift) * BLOCK_Q),
        *_summed_tile(spec, part),
    )
    body = (
        Let("head_kv", HEAD // GROUP),
        Let("shift", DIAGONAL - (Q_BLOCKS - 1), note="of the block of keys against that of queries"),
        Fill("g", Const(0.0)),
        For("q_block", maximum(Const(0), Const(0) - shift), minimum(Q_BLOCKS, blocks_kv - shift), step),
        Let("q_start", Const(0), note="the index is that of any of these tiles"),
        Let("kv_start", shift * BLOCK_Q),
        *_to_elements(spec, part),
    )
    axes = (Axis("diagonal", Q_BLOCKS + blocks_kv - 1), *_HEAD_AXES)
    return _kernel(spec, part, axes, ("block_q", "block_q"), (*_VECTOR_TILES, *_target(part)), body)


_HEAD_AXES = (Axis("head", HEADS), Axis("batch", BATCHES))
_UNIT = Buffer("unit", ("any",), F32, Space.GLOBAL, by_element=True)
_VECTOR_TILES = tuple(Buffer(name, ("block_q",), F32, Space.SHARED) for name in ("lse_tile", "delta_tile"))


def _kernel(
    spec: Spec, part: Part, axes: tuple[Axis, ...], tile: tuple[str, str], more: tuple[Buffer, ...], body: tuple
) -> Kernel:
    """tile: the dimensions of the scores. more: buffers that not all nests have, the target last."""
    *own, target = more
    keys = next((dim for dim in tile if dim != "block_q"), "block_q")
    factor = (parts.register("factor", *tile),) if _has_factor(spec, part) else ()
    return Kernel(
        name=NAME,
        level=Level.TILE,
        scalars=(*parts.SIZES, Scalar("scale", F32), *dropout.scalars(spec)),
        axes=axes,
        buffers=(
            parts.tensor("q", spec, "seqlen_q", "head_dim"),
            parts.tensor("k", spec, "seqlen_k", "head_dim"),
            parts.tensor("v", spec, "seqlen_k", "head_dim_v"),
            parts.tensor("dout", spec, "seqlen_q", "head_dim_v"),
            parts.vector("lse_log2"),
            parts.vector("delta"),
            target,
            parts.shared("q_tile", spec, "block_q", "head_dim"),
            parts.shared("dout_tile", spec, "block_q", "head_dim_v"),
            parts.shared("k_tile", spec, keys, "head_dim"),
            parts.shared("v_tile", spec, keys, "head_dim_v"),
            *own,
            *(parts.register(name, *tile) for name in ("s", "p", "dp", "g")),
            *factor,
            *parts.arrays(spec),
            *((_UNIT,) if part.ordered else ()),
        ),
        body=body,
        note=f"The gradient of {text(part.load)}{', how large its terms are' if part.magnitude else ''}.",
    )


def _target(part: Part, seqlen: str = "") -> tuple[Buffer, ...]:
    if part.target == "sums":
        return (parts.vector("sums", seqlen),)
    return (Buffer("grad", ("any",) * len(part.index), part.dtype, Space.GLOBAL, by_element=True),)


def _load_queries() -> tuple[Stmt, ...]:
    return (
        Copy("q_tile", parts.rows_of("q", HEAD, Q_START)),
        Copy("lse_tile", parts.rows_of("lse_log2", HEAD, Q_START)),
        Copy("dout_tile", parts.rows_of("dout", HEAD, Q_START)),
        Copy("delta_tile", parts.rows_of("delta", HEAD, Q_START)),
    )


def _summed_tile(spec: Spec, part: Part) -> tuple[Stmt, ...]:
    """g += the contributions of one tile, of which nothing is loaded yet."""
    queries = _load_queries()
    return (
        *queries[:2],
        Copy("k_tile", parts.rows_of("k", HEAD_KV, KV_START)),
        *queries[2:],
        Copy("v_tile", parts.rows_of("v", HEAD_KV, KV_START)),
        *_contribution(spec, part, load("lse_tile", I), load("delta_tile", I), before=load("g", I, J)),
    )


def _contribution(
    spec: Spec, part: Part, lse: Expr, delta: Expr, transposed: bool = False, before: Expr | None = None
) -> tuple[Stmt, ...]:
    """g = dS' * (d f / d load), added to what was before. Rows behind the end are masked too: their sums count."""
    assert spec.score is not None
    products = (
        ("k_tile", "q_tile", "v_tile", "dout_tile") if transposed else ("q_tile", "k_tile", "dout_tile", "v_tile")
    )
    visible = parts.visible(spec, transposed, queries=True)
    factor = parts.of_element(derivative_by_load(spec.score.expr, part.load), spec, transposed)
    kept = (Map("factor", factor, note="the derivative of what follows, by the array"),)
    g = _weighted(spec, part, delta, load("factor", I, J) if _has_factor(spec, part) else factor)
    return (
        Gemm("s", *products[:2], transpose_b=True),
        *(kept if _has_factor(spec, part) else ()),
        Map("s", parts.scored(spec, transposed), note=spec.score.name),
        Map("s", select(visible, load("s", I, J), NEG_INF), note="mask"),
        Map("p", exp2(load("s", I, J) * parts.exponent(spec) - lse)),
        Gemm("dp", *products[2:], transpose_b=True),
        *dropout.gradient_dropped(spec, transposed),
        Map("g", Unary("abs", g) if part.magnitude else g if before is None else before + g),
    )


def _weighted(spec: Spec, part: Part, delta: Expr, factor: Expr) -> Expr:
    """0 where P is 0, though the derivative there may be infinite."""
    assert spec.score is not None
    p = load("p", I, J)
    ds = p * (load("dp", I, J) - delta)
    if factor == Const(1.0):
        return ds
    derivative = derivative_by_load(spec.score.expr, part.load)
    finite = tame(derivative, parts.ELEMENTS, negative_infinity=False)
    return ds * factor if finite else select(p > 0.0, ds * factor, 0.0)


def _has_factor(spec: Spec, part: Part) -> bool:
    """True where the derivative depends on the score, and so must be computed before the score function."""
    assert spec.score is not None
    return "score" in variables(derivative_by_load(spec.score.expr, part.load))


def _to_elements(spec: Spec, part: Part) -> tuple[Stmt, ...]:
    """The tile of contributions goes to the elements that its index says."""
    index = tuple(parts.of_index(item, spec) for item in part.index)
    if not part.plain:
        return (*_in_units(part, "g", I, J), ScatterAdd("grad", index, "g", note="the score function says where"))
    return (Scatter("grad", index, "g", (Q_START + I < SEQLEN_Q) & (KV_START + J < SEQLEN_K)),)


def _row_sums(spec: Spec, part: Part, start: Expr, transposed: bool = False) -> tuple[Stmt, ...]:
    if part.target == "sums":
        return (Copy(parts.rows_of("sums", HEAD, start), "g_row"),)
    index = tuple(parts.of_index(item, spec, transposed) for item in part.index)
    return (*_in_units(part, "g_row", I), ScatterAdd("grad", index, "g_row"))


def _in_units(part: Part, name: str, *place: Expr) -> tuple[Stmt, ...]:
    """What is added to integers, in theirs."""
    return (Map(name, load(name, *place) * load(_UNIT.name, Const(0))),) if part.ordered else ()
