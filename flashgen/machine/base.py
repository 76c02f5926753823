"""MACHINE statements that every family shares.

Each statement is declared once: its fields, what it writes and reads, its name (which is also the name of the macro in
templates/stmt that prints it), what must hold before it, and its meaning in the docstring's formula.
Register tiles are spread over the warps of the block; a statement on them is executed by every warp on its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.ir.expr import Expr
from flashgen.ir.nodes import Stmt, Tile, Window


@dataclass(frozen=True)
class MachineStmt(Stmt):
    """Base: NAME is the macro, FAMILY the template file, NEEDS the precondition in words."""

    NAME: ClassVar[str] = ""
    FAMILY: ClassVar[str] = "common"
    NEEDS: ClassVar[str] = "nothing"


@dataclass(frozen=True)
class Barrier(MachineStmt):
    """All threads of the block meet; writes to shared memory before it are seen after it."""

    NAME = "barrier"
    ORDERS = True


@dataclass(frozen=True)
class FillFragment(MachineStmt):
    """dst[...] = value."""

    dst: str
    value: Expr
    NAME = "fill_fragment"
    WRITES = ("dst",)


@dataclass(frozen=True)
class MapFragment(MachineStmt):
    """dst[i, j] = expr(i, j) for a register tile, dst[i] = expr(i) for a row vector.

    A load from a shared buffer of several stages has its stage as an additional first index.
    """

    dst: str
    expr: Expr
    NAME = "map_fragment"
    NEEDS = "shared buffers loaded in the expression have landed and a barrier has passed"
    WRITES = ("dst",)


@dataclass(frozen=True)
class MapQuads(MapFragment):
    """dst[i, j] = expr(i, j), where four elements, 8 rows and 8 columns apart, have their random numbers in common.

    The tile's first row and column are multiples of 16.
    """

    NAME = "map_quads"


@dataclass(frozen=True)
class PackFragment(MachineStmt):
    """dst[i, j] = round(expr(i, j)) to 16 bits, two values a register: the form of a matrix operand."""

    dst: str
    expr: Expr
    NAME = "pack_fragment"
    NEEDS = "shared buffers loaded in the expression have landed and a barrier has passed"
    WRITES = ("dst",)


@dataclass(frozen=True)
class ReduceRows(MachineStmt):
    """dst[i] = op(dst[i], op over the columns j that this thread holds of src[i, j])."""

    dst: str
    op: str
    src: str
    NAME = "reduce_rows"
    WRITES = ("dst",)
    READS = ("src", "dst")


@dataclass(frozen=True)
class CombineLanes(MachineStmt):
    """dst[i] = op over the lanes that hold row i: turns partial results of ReduceRows into the row's result."""

    dst: str
    op: str
    NAME = "combine_lanes"
    WRITES = ("dst",)
    READS = ("dst",)


@dataclass(frozen=True)
class StoreFragment(MachineStmt):
    """dst = src: a packed register tile goes to shared memory."""

    dst: Tile
    src: str
    NAME = "store_fragment"
    NEEDS = "no thread still reads dst: a barrier has passed since its last reader"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class StoreTransposed(StoreFragment):
    """dst = src^T: the columns of a packed register tile go to the rows of shared memory."""

    NAME = "store_transposed"


@dataclass(frozen=True)
class StoreTile(MachineStmt):
    """dst = src: a shared tile goes to global memory in 16-byte pieces; rows and columns out of range are dropped."""

    dst: Window
    src: Tile
    NAME = "store_tile"
    NEEDS = "a barrier has passed since src was written"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class LoadRows(MachineStmt):
    """dst[i] = src[i]: a row vector comes from global memory, zero out of range."""

    dst: str
    src: Window
    NAME = "load_rows"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class StoreRows(MachineStmt):
    """dst[i] = src[i]: a row vector goes to global memory; rows out of range are dropped."""

    dst: Window
    src: str
    NAME = "store_rows"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class AddFragment(MachineStmt):
    """dst += src, atomically and without order; dst is kept in the order of the register tile src."""

    dst: Window
    src: str
    NAME = "add_fragment"
    NEEDS = "dst was zeroed by an earlier kernel"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class LoadFragment(MachineStmt):
    """dst = src, where src is global and kept in the order of the register tile dst."""

    dst: str
    src: Window
    NAME = "load_fragment"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class ZeroWindow(MachineStmt):
    """dst = 0: a tile of a global accumulator kept in fragment order, in 16-byte pieces."""

    dst: Window
    NAME = "zero_window"
    WRITES = ("dst",)


@dataclass(frozen=True)
class StoreElements(MachineStmt):
    """dst[index(i, j)] = src[i, j] where `inside` holds: a register tile goes to an array of any rank and strides."""

    dst: str
    index: tuple[Expr, ...]
    src: str
    inside: Expr
    NAME = "store_elements"
    NEEDS = "no other element of any block has the same index"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class AddElements(MachineStmt):
    """dst[index(i, j)] += src[i, j], or index(i) and src[i] of a row vector, atomically and without order.

    A thread adds up its elements of one index before it adds them to dst, and a warp those of its threads. Zeros are
    not added, an index out of range is the last of its axis.
    """

    dst: str
    index: tuple[Expr, ...]
    src: str
    NAME = "add_elements"
    NEEDS = "dst was zeroed before the launch"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class Counter(MachineStmt):
    """name = value: a uniform integer that Assign changes; each warp keeps its own."""

    name: str
    value: Expr
    NAME = "counter"
    NEEDS = "the value is the same for all warps of a role"

    def assigns(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class Assign(MachineStmt):
    """name = value, for a counter."""

    name: str
    value: Expr
    NAME = "assign"
    NEEDS = "the counter name has been declared"

    def assigns(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class WhileLoop(MachineStmt):
    """The body, again for as long as the condition holds before it."""

    condition: Expr
    body: tuple[Stmt, ...]
    NAME = "while_loop"
    NEEDS = "the body changes a counter of the condition"
