"""The grammar of the IR.

    kernel  = Kernel(name, level, scalars*, axes*, buffers*, body*)
    scalar  = Scalar(name, dtype)                          a run-time argument: seqlen_q, group, scale_log2 ...
    buffer  = Buffer(name, shape, dtype, space, ...)       space = GLOBAL | SHARED | REGISTER
    axis    = Axis(name, extent, longest_first)            one grid axis; loops name their axis in For
    window  = Window(buffer, origin, heads, rows)          a tile of a global tensor (batch, head, row[, column])
    tile    = Tile(buffer, stage)                          one stage of a shared buffer
    stmt    = For | If | Let | Note                        both levels
            | Copy | Fill | Gemm | Map | RowReduce | Accumulate | Scatter | ScatterAdd     TILE
            | the statements of flashgen/machine           MACHINE

Shapes are written in dimensions with names ("block_q", "head_dim"); the plan gives them numbers, and the emitted CUDA
keeps the names. Rows of a window past the end of its tensor, or of its own, read as zero and are not written; so are
columns between the true and the padded head_dim. Every statement has a `note`: the reason, printed as the comment in
the CUDA.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

from flashgen.ir.dtype import DType
from flashgen.ir.expr import Const, Expr, Load, Search, walk


class Space(enum.Enum):
    """Where a buffer lives."""

    GLOBAL = "global"
    SHARED = "shared"
    REGISTER = "register"


@dataclass(frozen=True)
class Scalar:
    name: str
    dtype: DType


@dataclass(frozen=True)
class Axis:
    """A grid axis with its extent; `longest_first` walks it from the far end (causal tiles there are the longest)."""

    name: str
    extent: Expr
    longest_first: bool = False


@dataclass(frozen=True)
class Buffer:
    """A named array.

    `stages`: how many copies of a shared buffer are in flight. `warps`: how the rows and columns of a register
    tile are divided among the warps (rows, columns), from `first_warp` on; `copies`: so many warps hold each part, with
    the same values. `layout_of`: of a global accumulator, the register tile that is added to it, in whose order it is
    kept. `by_element`: a global array of any rank and strides, which expressions load element by element, and scatters
    write. `by_column`: a register vector with a number for each column of a tile, of which every lane of a warp holds a
    part, and not for each row.
    """

    name: str
    shape: tuple[str, ...]
    dtype: DType
    space: Space
    stages: int = 1
    warps: tuple[int, int] | None = None
    first_warp: int = 0
    copies: int = 1
    layout_of: str = ""
    by_element: bool = False
    by_column: bool = False

    @property
    def of_any_size(self) -> bool:
        """True for a global array whose sizes are its own, not those of the call: what functions read."""
        return self.shape[:1] == ("any",)

    def is_transposed(self, tile: Buffer) -> bool:
        """Of a global accumulator: True where the rows of the register tile that is added to it are its columns."""
        return bool(self.layout_of) and tile.shape[0] == self.shape[-1]


@dataclass(frozen=True)
class Window:
    """A tile of a global tensor that starts at `origin`.

    heads: its rows are those of so many heads, the same positions of each, one head after the other: of n rows, row r
    is position r % (n / heads) of head r / (n / heads), both counted from the origin.
    rows: how many from the origin on belong to it, none where negative; None for all up to the end of the tensor.
    """

    buffer: str
    origin: tuple[Expr, ...]
    heads: int = 1
    rows: Expr | None = None

    def each_head(self) -> tuple[Window, ...]:
        """The same rows as a window for each head."""
        batch, head, *rest = self.origin
        return tuple(Window(self.buffer, (batch, head + k, *rest), rows=self.rows) for k in range(self.heads))


FIRST_STAGE = Const(0)


@dataclass(frozen=True)
class Tile:
    buffer: str
    stage: Expr = FIRST_STAGE


Place = str | Window | Tile


@dataclass(frozen=True)
class Stmt:
    """Base of the statements; subclasses name the fields that they write and read."""

    note: str = field(default="", kw_only=True)

    WRITES: ClassVar[tuple[str, ...]] = ()
    READS: ClassVar[tuple[str, ...]] = ()
    ORDERS: ClassVar[bool] = False  # others may not pass it: it says when they are seen, not what they compute

    def writes(self) -> tuple[Place, ...]:
        """Places written, in field order."""
        return tuple(getattr(self, name) for name in self.WRITES)

    def reads(self) -> tuple[Place, ...]:
        """Places read: operand fields, then buffers loaded in expressions."""
        return self._reads

    @cached_property
    def _reads(self) -> tuple[Place, ...]:
        places = [getattr(self, name) for name in self.READS]
        for expr in self.expressions():
            places += [node.buffer for node in walk(expr) if isinstance(node, Load | Search)]
        return tuple(dict.fromkeys(places))

    def assigns(self) -> tuple[str, ...]:
        """Uniform integers that it gives a value."""
        return ()

    def expressions(self) -> Iterator[Expr]:
        """Expressions in the fields, those of windows and tiles included."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Expr):
                yield value
            elif isinstance(value, Window):
                yield from value.origin
                if value.rows is not None:
                    yield value.rows
            elif isinstance(value, Tile):
                yield value.stage
            elif isinstance(value, tuple):
                yield from (part for part in value if isinstance(part, Expr))


@dataclass(frozen=True)
class For(Stmt):
    axis: str
    start: Expr
    stop: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class If(Stmt):
    condition: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Let(Stmt):
    """A uniform integer that later statements name."""

    name: str
    value: Expr

    def assigns(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Note(Stmt):
    """A comment on its own."""


@dataclass(frozen=True)
class Copy(Stmt):
    """dst = src, or its transpose, where one of the two is on chip."""

    dst: Place
    src: Place
    transpose: bool = False
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class Fill(Stmt):
    """Every element of dst = value."""

    dst: Place
    value: Expr
    WRITES = ("dst",)


@dataclass(frozen=True)
class Gemm(Stmt):
    """acc (+)= op(a) op(b), with float32 accumulation; op transposes where the flag says so.

    columns: of b only the first ones, as many as this dimension; "" for all.
    """

    acc: str
    a: str
    b: str
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: bool = False
    columns: str = ""
    WRITES = ("acc",)
    READS = ("a", "b")

    def reads(self) -> tuple[Place, ...]:
        return super().reads() + ((self.acc,) if self.accumulate else ())


@dataclass(frozen=True)
class Map(Stmt):
    """dst[i, j] = expr(i, j), or dst[i] = expr(i) for a row vector."""

    dst: str
    expr: Expr
    WRITES = ("dst",)


@dataclass(frozen=True)
class RowReduce(Stmt):
    """dst[i] = op(dst[i], op over j of src[i, j]); op is "max" or "sum"."""

    dst: str
    op: str
    src: str
    WRITES = ("dst",)
    READS = ("src", "dst")


@dataclass(frozen=True)
class Accumulate(Stmt):
    """dst += src, atomically: other blocks add to the same global tile."""

    dst: Window
    src: str
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class Scatter(Stmt):
    """dst[index(i, j)] = src[i, j] where `inside` holds; no other element of any block has the same index."""

    dst: str
    index: tuple[Expr, ...]
    src: str
    inside: Expr
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class ScatterAdd(Stmt):
    """dst[index(i, j)] += src[i, j], or index(i) and src[i] of a row vector, atomically; zeros are not added.

    An index out of range, also a negative one, is the last of its axis, as where an expression loads.
    """

    dst: str
    index: tuple[Expr, ...]
    src: str
    WRITES = ("dst",)
    READS = ("src",)


class Level(enum.Enum):
    TILE = "tile"
    MACHINE = "machine"


@dataclass(frozen=True)
class Kernel:
    """A kernel at one of the two levels; `dims` is empty until a plan has given the dimensions their numbers."""

    name: str
    level: Level
    scalars: tuple[Scalar, ...]
    axes: tuple[Axis, ...]
    buffers: tuple[Buffer, ...]
    body: tuple[Stmt, ...]
    note: str = ""

    def buffer(self, name: str) -> Buffer:
        """The buffer of that name."""
        found = self._by_name.get(name)
        if found is None:
            raise KeyError(f"kernel {self.name} has no buffer {name}")
        return found

    @cached_property
    def _by_name(self) -> dict[str, Buffer]:
        return {buffer.name: buffer for buffer in self.buffers}

    def space(self, place: Place) -> Space:
        """Where a place lives."""
        return self.buffer(name_of(place)).space

    def having(self, **changes) -> Kernel:
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def with_buffer(self, buffer: Buffer) -> Kernel:
        """A copy in which the buffer of that name is replaced, or added."""
        kept = [buffer if old.name == buffer.name else old for old in self.buffers]
        return self.having(buffers=tuple(kept if buffer in kept else [*kept, buffer]))


def name_of(place: Place) -> str:
    """The buffer that a place is in."""
    return place if isinstance(place, str) else place.buffer
