"""A block of warps that run in an order drawn from a seed: each warp is a generator that stops before every statement.

A statement that waits yields a `Waiting`; when nobody can go on, that is a deadlock and everybody's place is printed.
The meaning of the statements is elsewhere: a function (block, warp, stmt) for each type, a generator where it waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from inspect import isgenerator
from typing import Any

import numpy as np

from flashgen.interp.common import Deadlock, Hazard, Uniform, Value, evaluate
from flashgen.interp.shared_memory import Access, InFlight, SharedMemory
from flashgen.interp.trace import Trace
from flashgen.ir.expr import Expr
from flashgen.ir.nodes import Buffer, For, If, Kernel, Let, Note, Stmt, Tile, Window
from flashgen.ir.printer import stmt_text
from flashgen.plan.plan import Plan

Meaning = Callable[["Block", "Warp", Any], Any]


@dataclass(frozen=True)
class Waiting:
    """Yielded by a statement that cannot go on until `ready()`."""

    ready: Callable[[], bool]


Steps = Generator[Waiting | None, None, None]


@dataclass
class Warp:
    """One warp: its uniform values, its part of each register buffer, and its asynchronous copies.

    arrays: those that are read by element. registers: a tile's part is [rows, columns]; a row vector's is [rows, 4],
    for the four lanes that hold a row.
    """

    index: int
    names: dict[str, Value]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    registers: dict[str, np.ndarray] = field(default_factory=dict)
    uncommitted: list[InFlight] = field(default_factory=list)
    groups: list[list[InFlight]] = field(default_factory=list)
    at: Stmt | None = None
    waiting: Waiting | None = None
    finished: bool = False

    def uniform(self, expr: Expr) -> int:
        return int(evaluate(expr, Uniform(self.names, self.arrays)))


class Block:
    """One thread block: its shared memory, its warps and what they share."""

    def __init__(
        self,
        kernel: Kernel,
        plan: Plan,
        arrays: Mapping[str, np.ndarray],
        names: Mapping[str, Value],
        meanings: Mapping[type, Meaning],
        trace: Trace,
    ):
        self.kernel, self.plan, self.arrays, self.trace, self.meanings = kernel, plan, arrays, trace, meanings
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in kernel.buffers}
        self.sizes = plan.sizes
        self.shared = SharedMemory(kernel, plan)
        self.warps = [Warp(index, {**names, "warp": index}, arrays) for index in range(plan.warps)]
        divided = any(buffer.first_warp for buffer in kernel.buffers)
        self.holders = 4 if divided else plan.computing_warps  # of a register buffer: all, or a warpgroup's four
        self.arrived: dict[int, Stmt] = {}
        self.stored: dict[tuple, np.ndarray] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.sizes[dim] for dim in self.buffers[name].shape)

    def access(self, warp: Warp, stmt: Stmt, tile: Tile) -> Access:
        return Access(warp.index, stmt, tile.buffer, warp.uniform(tile.stage))

    def run(self, seed: object) -> None:
        """Every warp to its end, in an order drawn from the seed."""
        draw = random.Random(repr(seed))
        running = {warp.index: self.steps(warp, self.kernel.body) for warp in self.warps}
        while running:
            ready = [index for index in running if self._ready(self.warps[index])]
            if not ready:
                raise Deadlock(self._who_waits_where())
            index = ready[draw.randrange(len(ready))]
            try:
                self.warps[index].waiting = next(running[index])
            except StopIteration:
                self.warps[index].finished = True
                del running[index]

    def meet(self, warp: Warp, stmt: Stmt) -> Steps:
        """All warps of the block meet at one barrier."""
        self.arrived[warp.index] = stmt
        if len(self.arrived) < len(self.warps):
            epoch = self.shared.epoch
            yield Waiting(lambda: self.shared.epoch > epoch)
            return
        if any(other is not stmt for other in self.arrived.values()):
            raise Deadlock(f"the warps meet at different barriers: {self._who_waits_where()}")
        self.arrived.clear()
        self.shared.barrier()

    def _ready(self, warp: Warp) -> bool:
        return warp.waiting is None or warp.waiting.ready()

    def _who_waits_where(self) -> str:
        lines = []
        for warp in self.warps:
            place = f"`{stmt_text(warp.at)}`" if warp.at else "its first statement"
            note = f" ({warp.at.note})" if warp.at and warp.at.note else ""
            lines.append(f"warp {warp.index} " + ("has finished" if warp.finished else f"waits at {place}{note}"))
        return "; ".join(lines)

    def steps(self, warp: Warp, body: tuple[Stmt, ...]) -> Steps:
        """The warp's way through a body; it stops before each statement, so that others may come first."""
        for stmt in body:
            warp.at = stmt
            match stmt:
                case For():
                    for value in range(warp.uniform(stmt.start), warp.uniform(stmt.stop)):
                        warp.names[stmt.axis] = value
                        yield from self.steps(warp, stmt.body)
                case If():
                    if warp.uniform(stmt.condition):
                        yield from self.steps(warp, stmt.body)
                case Let():
                    warp.names[stmt.name] = warp.uniform(stmt.value)
                case Note():
                    pass
                case _:
                    yield None
                    yield from self._step(warp, stmt)

    def _step(self, warp: Warp, stmt: Stmt) -> Steps:
        if type(stmt) not in self.meanings:
            raise TypeError(f"{type(stmt).__name__} is not a statement of {self.plan.arch.family}")
        self.trace.count(type(stmt).__name__)
        result = self.meanings[type(stmt)](self, warp, stmt)
        if isgenerator(result):
            yield from result

    # Global memory

    def window(self, warp: Warp, window: Window, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
        """The (heads, seqlen[, head_dim]) array that a window lies in, and its first head, row (and column)."""
        batch, *origin = (warp.uniform(expr) for expr in window.origin)
        head, last = origin[0], origin[0] + window.heads - 1
        array = self.arrays[window.buffer]
        if not (0 <= batch < array.shape[0] and 0 <= head <= last < array.shape[1]):
            at = stmt_text(warp.at) if warp.at else ""
            raise Hazard(f"warp {warp.index}, `{at}`: {window.buffer} has no batch {batch}, head {last}")
        return array[batch], (*origin, *(0,) * (len(shape) + 1 - len(origin)))

    def load(self, warp: Warp, window: Window, shape: tuple[int, ...], *index: np.ndarray) -> np.ndarray:
        """Elements (rows[, columns]) of a window, zero out of range; counts the bytes of those in range."""
        array, origin = self.window(warp, window, shape)
        where, inside = _where(array, origin, _by_head(window, shape, index), _rows(warp, window))
        self.trace.global_bytes_read += int(inside.sum()) * self.buffers[window.buffer].dtype.bytes
        values = np.zeros(inside.shape, np.float32)
        values[inside] = array[tuple(part[inside] for part in where)]
        return values

    def store(
        self,
        warp: Warp,
        window: Window,
        shape: tuple[int, ...],
        values: np.ndarray,
        *index: np.ndarray,
        add: bool = False,
    ) -> None:
        """Elements of a window, dropped out of range; `add` adds to what is there."""
        array, origin = self.window(warp, window, shape)
        where, inside = _where(array, origin, _by_head(window, shape, index), _rows(warp, window))
        self.trace.global_bytes_written += int(inside.sum()) * self.buffers[window.buffer].dtype.bytes
        target = tuple(part[inside] for part in where)
        array[target] = array[target] + values[inside] if add else values[inside]


def _by_head(window: Window, shape: tuple[int, ...], index: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The head, the position (and the column) of elements (rows[, columns]) of a tile."""
    return (*np.divmod(index[0], shape[0] // window.heads), *index[1:])


def _rows(warp: Warp, window: Window) -> int | None:
    """How many rows of its array a window has at most, where not all."""
    return None if window.rows is None else warp.uniform(window.rows)


def _where(array: np.ndarray, origin: tuple[int, ...], index: tuple[np.ndarray, ...], rows: int | None = None):
    """Positions of a window's elements in the array, and which of them exist, of the first `rows`."""
    where = np.broadcast_arrays(*(np.asarray(part) + start for part, start in zip(index, origin, strict=True)))
    inside = np.ones(where[0].shape, bool)
    for part, size in zip(where, array.shape, strict=True):
        inside &= (part >= 0) & (part < size)
    return where, inside if rows is None else inside & (where[1] < origin[1] + rows)
