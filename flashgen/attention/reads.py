"""Whether functions read outside of an array: counted for every element of the scores that a query sees.

What a function reads counts where it decides something: of a score function where the masks show the element, of
`where(c, x, y)` the side that is taken, of `x & y` and `x | y` the second part where the first one does not decide. An
index that is out of range, also a negative one, would read the last of its axis.

The tile is that of attention/blocks.py: rows are blocks of keys, columns their keys; loops go through all keys and the
queries of a block. Sequences have lengths of their own where they are packed or padded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.attention import parts
from flashgen.attention.blocks import BLOCK_SIZE, FIRST, PLACE, QUERY, TILE_BLOCKS
from flashgen.attention.lengths import LENGTH_K, USED
from flashgen.attention.parts import BATCH, BATCHES, HEAD, HEADS, Q_BLOCK, Q_START, SEQLEN_K, SEQLEN_Q
from flashgen.attention.varlen import ARRAYS, OFFSETS
from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import (
    Binary,
    Const,
    Expr,
    I,
    Load,
    Search,
    Select,
    Var,
    ceil_div,
    children,
    load,
    minimum,
    select,
    substitute,
)
from flashgen.ir.nodes import Axis, Buffer, Copy, Fill, For, Kernel, Let, Level, Map, RowReduce, Scalar, Space, Window
from flashgen.ir.visit import Body
from flashgen.spec import Array, Function, Spec
from flashgen.trace.value import negation

NAME = "attention_reads"
TILE = Var("tile")
NEVER: Expr = Const(False)


def size(array: str, axis: int) -> str:
    """The scalar with the size of an axis of an array."""
    return f"{array}_size_{axis}"


def reads(spec: Spec, array: Array) -> Kernel:
    """The kernel that counts the elements for which the functions of a spec read outside of one of their arrays.

    outside (1, heads, rows of all tiles): float32, 64 numbers for each block of queries: each of its keys 64 apart.
    """
    lengths = ("total_q",) if spec.varlen else ("seqlen_q", LENGTH_K.name)
    names = (*lengths, "heads", "batches", *(size(array.name, axis) for axis in range(array.rank)))
    place = {"i": QUERY, "kv_start": (FIRST + I) * BLOCK_SIZE}
    step = (
        Map("shown", select(substitute(_of_element(spec, array.name), place), 1.0, 0.0)),
        RowReduce("count", "sum", "shown"),
    )
    queries = For("query", Const(0), minimum(BLOCK_SIZE, SEQLEN_Q - Q_START), step)
    first = Let("first_block", TILE * TILE_BLOCKS, note="of keys: a row of the tile for each")
    told = (name for name in ARRAYS if (spec.used if name == USED else spec.varlen))
    return Kernel(
        name=NAME,
        level=Level.TILE,
        scalars=tuple(Scalar(name, I32) for name in names),
        axes=(Axis("place", places(spec)), Axis("head", HEADS)),
        buffers=(
            Buffer("outside", ("one", "heads", "rows_of_all"), F32, Space.GLOBAL),
            parts.register("shown", "tile_blocks", "block_size"),
            parts.register("count", "tile_blocks"),
            *parts.arrays(spec),
            *(Buffer(name, ("any",), I32, Space.GLOBAL, by_element=True) for name in told),
        ),
        body=(
            Let("rows_of_all", places(spec) * TILE_BLOCKS),
            *_place(spec),
            Let("q_start", Q_BLOCK * BLOCK_SIZE),
            Fill("count", Const(0.0)),
            For("tile", Const(0), ceil_div(SEQLEN_K, TILE_BLOCKS * BLOCK_SIZE), (first, queries)),
            Copy(Window("outside", (Const(0), HEAD, PLACE * TILE_BLOCKS)), "count"),
        ),
    )


def places(spec: Spec) -> Expr:
    """Blocks of queries, of all sequences. Packed ones leave gaps between theirs, as in attention/varlen.py."""
    if spec.varlen:
        return Var("total_q") // BLOCK_SIZE + BATCHES
    return BATCHES * ceil_div(SEQLEN_Q, BLOCK_SIZE)


def _place(spec: Spec) -> Body:
    """The sequence of a block of queries, its place there, and the lengths that are no argument."""
    keys: Expr = LENGTH_K
    if spec.varlen:
        of_q, of_k = (load(name, BATCH + 1) - load(name, BATCH) for name in OFFSETS.values())
        keys = of_k
        found: Body = (
            Let("batch", Search(OFFSETS["q"], BATCHES, BLOCK_SIZE, PLACE), note="the sequence of this block"),
            Let("q_block", PLACE - (load(OFFSETS["q"], BATCH) // BLOCK_SIZE + BATCH)),
            Let("seqlen_q", of_q),
        )
    else:
        q_blocks = ceil_div(SEQLEN_Q, BLOCK_SIZE)
        found = (Let("batch", PLACE // q_blocks), Let("q_block", PLACE % q_blocks))
    return (*found, Let("seqlen_k", minimum(load(USED, BATCH), keys) if spec.used else keys))


def _of_element(spec: Spec, array: str) -> Expr:
    """True for an element that is seen, and for which a read of the array that counts is outside of it."""
    arguments = parts.arguments_of(spec, transposed=False)
    of_mask = _behind(replace(spec, mask=None), spec.mask, arguments, array)
    return _either(of_mask, _behind(spec, spec.score, arguments, array))


def _behind(spec: Spec, function: Function | None, arguments: dict[str, Expr], array: str) -> Expr:
    """True where a function reads outside of an array, of what the masks of the spec show."""
    if function is None:
        return NEVER
    return _both(parts.visible(spec), outside(substitute(function.expr, arguments), array))


def outside(expr: Expr, array: str) -> Expr:
    """True where an expression, as it is evaluated, reads outside of the array."""
    match expr:
        case Load(buffer, index):
            own = [(part < 0) | (part >= Var(size(array, axis))) for axis, part in enumerate(index)]
            return reduce(
                _either, (*(own if buffer == array else ()), *(outside(part, array) for part in index)), NEVER
            )
        case Select(condition, x, y):
            taken = _both(condition, outside(x, array)), _both(negation(condition), outside(y, array))
            return reduce(_either, (outside(condition, array), *taken))
        case Binary("&" | "|" as op, x, y):
            undecided = x if op == "&" else negation(x)
            return _either(outside(x, array), _both(undecided, outside(y, array)))
    return reduce(_either, (outside(part, array) for part in children(expr)), NEVER)


def _either(x: Expr, y: Expr) -> Expr:
    return y if x == NEVER else x if y == NEVER else x | y


def _both(x: Expr, y: Expr) -> Expr:
    return NEVER if NEVER in (x, y) else x & y
