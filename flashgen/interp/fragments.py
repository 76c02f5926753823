"""Register tiles as warps and lanes hold them, and expressions over them.

A tile is divided among the warps: warp w of a (rows, columns) = (wm, wn) division has part (w // wn, w % wn). On sm90
warpgroups divide a tile, and the four warps of each the rows of its part. Of a tile in copies the warps (warpgroups)
that would divide its columns hold them all. Within a warp, an accumulator's row is held
by four lanes: column j by lane (j % 8) // 2 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). A row vector is held by all
four lanes of its rows, each with a value of its own: after ReduceRows these differ, until CombineLanes.
"""

from __future__ import annotations

import numpy as np

from flashgen.interp.common import Hazard, Value, evaluate, gather
from flashgen.interp.shared_memory import Access
from flashgen.interp.warps import Block, Warp
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Expr, I, J, Load, text
from flashgen.ir.nodes import Space, Stmt
from flashgen.ir.printer import stmt_text

LANES = 4


def hazard(warp: Warp, stmt: Stmt, reason: str) -> Hazard:
    return Hazard(f"warp {warp.index}, `{stmt_text(stmt)}`: {reason}")


def rows_of(block: Block, warp: Warp, name: str) -> np.ndarray:
    """The rows of a register tile or row vector that a warp holds, as positions in the block's tile."""
    down, _ = _division(block, name)
    size = block.shape(name)[0] // down
    return _part(block, warp, name)[0] * size + np.arange(size)


def columns_of(block: Block, warp: Warp, name: str) -> np.ndarray:
    """The columns of a register tile that a warp holds."""
    _, across = _division(block, name)
    size = block.shape(name)[1] // across
    return _part(block, warp, name)[1] * size + np.arange(size)


def _part(block: Block, warp: Warp, name: str) -> tuple[int, int]:
    """Which part of a tile's rows and of its columns a warp holds."""
    down, across = _division(block, name)
    index = warp.index - block.buffers[name].first_warp
    if not 0 <= index < block.holders:
        raise Hazard(f"warp {warp.index} holds no part of {name}")
    together = block.holders // down  # hold parts of the same rows
    if block.plan.arch.family == "sm90":
        group, own = divmod(index, 4)
        return group // together * 4 + own, group % together % across
    return index // together, index % across


def _division(block: Block, name: str) -> tuple[int, int]:
    buffer, shape = block.buffers[name], block.shape(name)
    if buffer.warps is None:
        raise Hazard(f"register buffer {name} is not divided among the warps")
    down, across = buffer.warps
    if len(shape) == 2 and down * across * buffer.copies != block.holders:
        raise Hazard(f"{name} is divided among {down} x {across} warps, but {block.holders} hold it")
    if any(size % parts for size, parts in zip(shape, buffer.warps, strict=False)) or block.holders % down:
        raise Hazard(f"{name} of {' x '.join(map(str, shape))} cannot be divided among {down} x {across} warps")
    return down, across


def get(warp: Warp, stmt: Stmt, name: str) -> np.ndarray:
    """A warp's part of a register buffer."""
    if name not in warp.registers:
        raise hazard(warp, stmt, f"{name} is read before anything was written to it")
    return warp.registers[name]


def agreed(warp: Warp, stmt: Stmt, name: str) -> np.ndarray:
    """A row vector as one value a row; partial results of ReduceRows are an error."""
    value = get(warp, stmt, name)
    if not np.array_equal(value, np.broadcast_to(value[:, :1], value.shape), equal_nan=True):
        raise hazard(warp, stmt, f"partial row result read: the lanes that hold a row of {name} were not combined")
    return value[:, 0]


def by_lane(tile: np.ndarray) -> np.ndarray:
    """[rows, columns] -> [rows, 4, columns of each lane]."""
    rows, columns = tile.shape
    return tile.reshape(rows, columns // 8, LANES, 2).swapaxes(1, 2).reshape(rows, LANES, columns // LANES)


class Elements:
    """The scope of an expression over a warp's part of a register tile, of a row vector in each lane, or of columns."""

    def __init__(self, block: Block, warp: Warp, stmt: Stmt, dst: str):
        self.block, self.warp, self.stmt, self.dst = block, warp, stmt, dst
        self.is_tile = len(block.shape(dst)) == 2
        self.whole = block.buffers[dst].dtype == I32
        self.columns: np.ndarray | None = None
        if block.buffers[dst].by_column:
            self.columns = np.arange(block.shape(dst)[0])
            self.shape: tuple[int, ...] = self.columns.shape
            return
        self.rows = rows_of(block, warp, dst)[:, None]
        self.shape = (len(self.rows), LANES)
        if self.is_tile:
            self.columns = columns_of(block, warp, dst)
            self.shape = (len(self.rows), len(self.columns))

    def evaluate(self, expr: Expr) -> np.ndarray:
        """The value of every element, in memory of its own."""
        return np.array(np.broadcast_to(evaluate(expr, self), self.shape), np.int32 if self.whole else np.float32)

    def variable(self, name: str) -> Value:
        if name == "i":
            return self.rows
        if name == "j" and self.columns is not None:
            return self.columns
        return self.warp.names[name]

    def load(self, expr: Load) -> Value:
        space = self.block.buffers[expr.buffer].space
        if space is Space.REGISTER:
            return self._register(expr)
        index = [evaluate(part, self) for part in expr.index]
        if space is Space.GLOBAL:
            return gather(self.block.arrays[expr.buffer], index)
        stage = int(index.pop(0)) if len(index) > len(self.block.shape(expr.buffer)) else 0
        value = self.block.shared.read(Access(self.warp.index, self.stmt, expr.buffer, stage), *index)
        self.block.trace.shared(self.block.plan.arch, self.block.shared.nbytes(expr.buffer, value.size))
        return value

    def array(self, name: str) -> np.ndarray:
        return self.block.arrays[name]

    def _register(self, expr: Load) -> np.ndarray:
        """A thread can only load what it holds itself: the same element, or its row's value."""
        mine, theirs = self.block.buffers[self.dst].warps, self.block.buffers[expr.buffer].warps
        assert mine is not None and theirs is not None
        if expr.index == (J,) and self.is_tile and mine == theirs and self.block.buffers[expr.buffer].by_column:
            return get(self.warp, self.stmt, expr.buffer)
        if expr.index == (I, J) and self.is_tile and mine == theirs:
            return get(self.warp, self.stmt, expr.buffer)
        if expr.index == (I,) and mine[0] == theirs[0]:
            if self.is_tile:
                return agreed(self.warp, self.stmt, expr.buffer)[:, None]
            return get(self.warp, self.stmt, expr.buffer)
        raise hazard(self.warp, self.stmt, f"{text(expr)} ({theirs}) is in other threads than {self.dst} ({mine})")
