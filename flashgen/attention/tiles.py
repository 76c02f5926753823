"""What a score function reads by [.., q_idx, kv_idx] is a tile: rows of queries and columns of keys, as the scores are.

A loop nest then copies it as it copies keys and values, and takes the element (i, j) of the tile where the function has
an element of the array. The call says whether an array lies so that tiles of it can be copied (`Spec.tiled`).
"""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.calculus import derivative
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Const, Expr, I, J, Load, Var, minimum, rebuild, select, substitute, variables, walk
from flashgen.ir.nodes import Buffer, Copy, Scalar, Space, Window
from flashgen.spec import Array, Spec

PLACE = (Var("q_idx"), Var("kv_idx"))
OUTER = 2  # axes before these: a tensor map of (batch, head, row, column) has no more
Arguments = dict[str, Expr]


def fit(spec: Spec) -> tuple[Array, ...]:
    """The arrays of 16-bit numbers that the score function reads nowhere but at [.., q_idx, kv_idx].

    The axes before these may be indexed by what is the same for all elements: b, h and numbers.
    """
    if spec.score is None or spec.varlen or spec.packed > 1:
        return ()  # tiles of packed heads, and those of packed sequences, are several tiles of an array
    return tuple(item for item in spec.score.arrays if item.dtype.bytes == 2 and _is_tile(spec, item))


def _is_tile(spec: Spec, array: Array) -> bool:
    indices = _indices(spec, array)
    if len(indices) != 1:  # read at two places: two tiles
        return False
    if array.rank not in (2, 3, 4):
        return False
    *outer, row, column = next(iter(indices))
    loads = any(isinstance(node, Load) for part in outer for node in walk(part))
    uniform = {name for part in outer for name in variables(part)} <= {"b", "h"}
    return (row, column) == PLACE and uniform and not loads


def _indices(spec: Spec, array: Array) -> set[tuple[Expr, ...]]:
    assert spec.score is not None
    return {node.index for node in walk(spec.score.expr) if isinstance(node, Load) and node.buffer == array.name}


def of(spec: Spec) -> tuple[Array, ...]:
    """The arrays of which this spec's kernels copy tiles."""
    return fit(spec) if spec.tiled else ()


def in_backward(spec: Spec) -> bool:
    """True where the backward copies them too: where they are added, so that the derivative does not read them."""
    names = {item.name for item in of(spec)}
    slope = derivative(spec.score.expr, "score") if spec.score else Const(1.0)
    return bool(names) and not any(isinstance(node, Load) and node.buffer in names for node in walk(slope))


def tile(array: Array) -> str:
    """The shared tile of an array. No array of a function has such a name: theirs begin with mask_ or score_."""
    return f"aux_{array.name.removeprefix('score_')}_tile"


def last(array: Array, axis: int) -> str:
    """The scalar that is the last index of an axis; 0 where all of its indices are the same place."""
    return f"{tile(array)}_last{axis}"


def buffers(spec: Spec) -> tuple[Buffer, ...]:
    """The shared tiles."""
    return tuple(Buffer(tile(item), ("block_q", "block_kv"), item.dtype, Space.SHARED) for item in of(spec))


def whole(array: Array) -> Buffer:
    """The array itself, of which windows are copied."""
    return Buffer(array.name, ("any", "any", "seqlen_q", "seqlen_k"), array.dtype, Space.GLOBAL)


def scalars(spec: Spec) -> tuple[Scalar, ...]:
    """The last indices of the axes before the last two."""
    return tuple(Scalar(last(item, axis), I32) for item in of(spec) for axis in range(item.rank - 2))


def copies(spec: Spec, arguments: Arguments, start: tuple[Expr, Expr]) -> Iterator[Copy]:
    """The copy of each tile. arguments: of the function. start: the first query and the first key."""
    for item in of(spec):
        index = next(iter(_indices(spec, item)))[:-2]
        outer = [_within(substitute(part, arguments), last(item, axis)) for axis, part in enumerate(index)]
        yield Copy(tile(item), Window(item.name, (*[Const(0)] * (OUTER - len(outer)), *outer, *start)))


def _within(index: Expr, last: str) -> Expr:
    """An index out of range, also a negative one, reads the last of its axis, as elsewhere."""
    if isinstance(index, Var) or (isinstance(index, Const) and index.value >= 0):
        return minimum(index, Var(last))
    return select(index < 0, Var(last), minimum(index, Var(last)))


def read(expr: Expr, spec: Spec, transposed: bool) -> Expr:
    """The function's expression with elements of tiles in place of those of the arrays."""
    names = {item.name: tile(item) for item in of(spec)}

    def change(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in names:
            return Load(names[expr.buffer], (J, I) if transposed else (I, J))
        return rebuild(expr, change)

    return change(expr) if names else expr
