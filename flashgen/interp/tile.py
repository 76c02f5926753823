"""Runs a TILE kernel on the CPU, block by block, rounding where the GPU rounds.

A grid axis that only says which (batch, head) a window is in becomes an array dimension: every step of the kernel
then runs for many heads at once, and only blocks of rows are Python loops. A value on chip is an array
(lanes, rows[, cols]), where a lane is one combination of those axes; a leading 1 stands for "the same in every lane".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from flashgen.interp import tf32
from flashgen.interp.common import (
    Hazard,
    Uniform,
    Value,
    add_elements,
    evaluate,
    gather,
    number,
    real,
    round_to,
    store_elements,
)
from flashgen.interp.lanes import chunks, lane_bytes, lanes_of, vectorisable
from flashgen.ir.expr import Expr, I, J, Load
from flashgen.ir.nodes import (
    Accumulate,
    Buffer,
    Copy,
    Fill,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Level,
    Map,
    Note,
    Place,
    RowReduce,
    Scatter,
    ScatterAdd,
    Space,
    Stmt,
    Tile,
    Window,
    name_of,
)

Listener = Callable[[Stmt, str, int], None]

READ, WRITE, FLOPS = "global_bytes_read", "global_bytes_written", "flops"


@dataclass
class Counter:
    """A listener that adds up what a kernel moves and computes."""

    global_bytes_read: int = 0
    global_bytes_written: int = 0
    flops: int = 0
    statements: dict[str, int] = field(default_factory=dict)

    def __call__(self, stmt: Stmt, event: str, amount: int) -> None:
        setattr(self, event, getattr(self, event) + amount)
        name = type(stmt).__name__
        self.statements[name] = self.statements.get(name, 0) + 1


def run(
    kernel: Kernel,
    dims: Mapping[str, int],
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping[str, int | float],
    listener: Listener | None = None,
) -> None:
    """Executes the whole grid; outputs among `arrays` are written in place."""
    assert kernel.level is Level.TILE, kernel.name
    values: dict[str, Value] = {**dims, **{name: number(value) for name, value in scalars.items()}}
    extents = {axis.name: int(evaluate(axis.extent, Uniform(values))) for axis in kernel.axes}
    lane_axes = vectorisable(kernel)
    loop_axes = [name for name in extents if name not in lane_axes]
    lanes = lanes_of({name: extents[name] for name in reversed(extents) if name in lane_axes})
    with np.errstate(all="ignore"):
        for chunk in chunks(lanes, lane_bytes(kernel, dims)):
            for block in product(*(range(extents[name]) for name in loop_axes)):
                names = {**values, **dict(zip(loop_axes, block, strict=True)), **chunk}
                _Block(kernel, dims, arrays, names, listener).run(kernel.body)


class _Block:
    """One grid block of every lane of a chunk. Values on chip are rebound, never changed in place (but for Gemm)."""

    def __init__(
        self,
        kernel: Kernel,
        dims: Mapping[str, int],
        arrays: Mapping[str, np.ndarray],
        names: dict[str, Value],
        listener: Listener | None,
    ):
        self.buffers: dict[str, Buffer] = {buffer.name: buffer for buffer in kernel.buffers}
        self.dims, self.arrays, self.names, self.listener = dims, arrays, names, listener
        self.chip: dict[tuple[str, int], np.ndarray] = {}
        self.lanes = max((len(value) for value in names.values() if isinstance(value, np.ndarray)), default=1)

    def run(self, body: tuple[Stmt, ...]) -> None:
        for stmt in body:
            RUN[type(stmt)](self, stmt)

    def uniform(self, expr: Expr) -> Any:
        """A value that is the same in every lane."""
        value = evaluate(expr, _Elements(self, ()))
        return np.asarray(value).reshape(()).item()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.dims[dim] for dim in self.buffers[name].shape)

    def tell(self, stmt: Stmt, event: str, amount: int) -> None:
        if self.listener is not None:
            self.listener(stmt, event, amount)

    # Places

    def key(self, place: Place) -> tuple[str, int]:
        return (place.buffer, int(self.uniform(place.stage))) if isinstance(place, Tile) else (name_of(place), 0)

    def get(self, place: Place) -> np.ndarray:
        """The value of a place on chip."""
        key = self.key(place)
        if key not in self.chip:
            raise Hazard(f"{key[0]} (stage {key[1]}) is read before anything was written to it")
        return self.chip[key]

    def put(self, place: Place, value: np.ndarray) -> None:
        self.chip[self.key(place)] = value

    def window(self, window: Window, shape: tuple[int, ...]) -> tuple[np.ndarray, tuple, tuple, int]:
        """The global array, the index of the part in range, the same part within the tile, and its bytes."""
        array = self.arrays[window.buffer]
        batch, head, *origin = window.origin
        scope = _Elements(self, ())
        index: list[Any] = [np.broadcast_to(evaluate(expr, scope), (self.lanes,)) for expr in (batch, head)]
        inner, elements = [slice(None)], self.lanes
        starts = [int(self.uniform(expr)) for expr in origin] + [0] * (len(shape) - len(origin))
        limits = list(array.shape[2:])
        if window.rows is not None:
            limits[0] = min(limits[0], starts[0] + int(self.uniform(window.rows)))
        for start, size, limit in zip(starts, shape, limits, strict=True):
            count = min(max(limit - start, 0), size)
            index.append(slice(start, start + count))
            inner.append(slice(0, count))
            elements *= count
        return array, tuple(index), tuple(inner), elements * self.buffers[window.buffer].dtype.bytes

    def load(self, stmt: Stmt, window: Window, shape: tuple[int, ...]) -> np.ndarray:
        if window.heads > 1:
            part_shape = (shape[0] // window.heads, *shape[1:])
            return np.concatenate([self.load(stmt, part, part_shape) for part in window.each_head()], axis=1)
        array, index, inner, moved = self.window(window, shape)
        self.tell(stmt, READ, moved)
        part = array[index]
        if part.shape[1:] == shape:
            return part
        tile = np.zeros((self.lanes, *shape), real())
        tile[inner] = part
        return tile

    def store(self, stmt: Stmt, window: Window, value: np.ndarray) -> None:
        if window.heads > 1:
            for part, rows in zip(window.each_head(), np.split(value, window.heads, axis=1), strict=True):
                self.store(stmt, part, rows)
            return
        array, index, inner, moved = self.window(window, value.shape[1:])
        self.tell(stmt, WRITE, moved)
        array[index] = value[inner]


class _Elements:
    """The scope of an expression over the elements of a tile (or a row vector, or nothing): lanes lead."""

    def __init__(self, block: _Block, shape: tuple[int, ...]):
        self.block, self.shape, self.rank = block, shape, len(shape)

    def variable(self, name: str) -> Value:
        if name == "i" and self.rank:
            return np.arange(self.shape[0]).reshape(-1, *(1,) * (self.rank - 1))
        if name == "j" and self.rank == 2:
            return np.arange(self.shape[1])
        value = self.block.names[name]
        return value.reshape(-1, *(1,) * self.rank) if isinstance(value, np.ndarray) else value

    def load(self, expr: Load) -> Value:
        if self.block.buffers[expr.buffer].space is Space.GLOBAL:
            return gather(self.block.arrays[expr.buffer], [evaluate(part, self) for part in expr.index])
        value = self.block.get(expr.buffer)
        match expr.index:
            case (a,) if a == I and self.rank == value.ndim - 1:
                return value
            case (a,) if a == I:
                return value[:, :, None]
            case (a,) if a == J:
                return value[:, None, :]
            case (a, b) if (a, b) == (I, J):
                return value
            case (a, b) if (a, b) == (J, I):
                return value.swapaxes(1, 2)
        index = [evaluate(part, self) for part in expr.index]
        lane = np.arange(len(value)).reshape(-1, *(1,) * self.rank)
        return value[(lane, *index)]

    def array(self, name: str) -> np.ndarray:
        return self.block.arrays[name]

    def whole(self, value: Value) -> np.ndarray:
        """The value of every element, in memory of its own."""
        shape = np.broadcast_shapes(np.shape(value), (1, *self.shape))
        return np.array(np.broadcast_to(value, shape), real())


def _for(block: _Block, stmt: For) -> None:
    for value in range(int(block.uniform(stmt.start)), int(block.uniform(stmt.stop))):
        block.names[stmt.axis] = value
        block.run(stmt.body)


def _if(block: _Block, stmt: If) -> None:
    if block.uniform(stmt.condition):
        block.run(stmt.body)


def _let(block: _Block, stmt: Let) -> None:
    value = evaluate(stmt.value, _Elements(block, ()))
    block.names[stmt.name] = value if np.ndim(value) else int(value)


def _note(block: _Block, stmt: Note) -> None:
    pass


def _copy(block: _Block, stmt: Copy) -> None:
    dst, src = block.buffers[name_of(stmt.dst)], block.buffers[name_of(stmt.src)]
    transposed = stmt.transpose or src.is_transposed(dst)
    if isinstance(stmt.src, Window):
        shape = block.shape(dst.name)
        value = block.load(stmt, stmt.src, shape[::-1] if transposed else shape)
    else:
        value = block.get(stmt.src)
    value = value.swapaxes(1, 2) if transposed else value
    if dst.dtype != src.dtype:
        value = round_to(dst.dtype, value)
    if isinstance(stmt.dst, Window):
        block.store(stmt, stmt.dst, value)
    else:
        block.put(stmt.dst, value if dst.space is Space.SHARED else value.copy())


def _fill(block: _Block, stmt: Fill) -> None:
    if not isinstance(stmt.dst, Window):
        scope = _Elements(block, block.shape(name_of(stmt.dst)))
        block.put(stmt.dst, scope.whole(evaluate(stmt.value, scope)))
        return
    shape = tuple(block.dims[dim] for dim in _tile_dims(block, stmt.dst))
    value = evaluate(stmt.value, _Elements(block, shape))
    block.store(stmt, stmt.dst, np.broadcast_to(np.asarray(value, real()), (block.lanes, *shape)))


def _tile_dims(block: _Block, window: Window) -> tuple[str, ...]:
    """The shape of a window that no tile on chip faces: the block of its row axis, and the whole head_dim."""
    buffer = block.buffers[window.buffer]
    if buffer.layout_of:
        return block.buffers[buffer.layout_of].shape
    rows = "block_kv" if buffer.shape[2] in ("seqlen_k", "total_k", "length_k") else "block_q"
    return (rows, *buffer.shape[3:])


def _gemm(block: _Block, stmt: Gemm) -> None:
    a, b = (tf32.operand(block.buffers[name].dtype, block.get(name)) for name in (stmt.a, stmt.b))
    a = a.swapaxes(1, 2) if stmt.transpose_a else a
    b = b.swapaxes(1, 2) if stmt.transpose_b else b
    b = b[:, :, : block.dims[stmt.columns]] if stmt.columns else b
    block.tell(stmt, FLOPS, 2 * block.lanes * a.shape[1] * a.shape[2] * b.shape[2])
    result = np.matmul(a, b)
    if stmt.accumulate:
        result += block.get(stmt.acc)
    block.put(stmt.acc, result)


def _map(block: _Block, stmt: Map) -> None:
    buffer = block.buffers[stmt.dst]
    scope = _Elements(block, block.shape(stmt.dst))
    value = evaluate(stmt.expr, scope)
    key = (stmt.dst, 0)
    if value is block.chip.get(key):  # a mask that hides nothing
        return
    computed = not isinstance(stmt.expr, Load) and isinstance(value, np.ndarray) and value.base is None
    owned = computed and value.shape[1:] == scope.shape and not any(value is other for other in block.chip.values())
    if buffer.dtype.bytes == 2:
        value = round_to(buffer.dtype, value)
    block.chip[key] = value if owned else scope.whole(value)


def _row_reduce(block: _Block, stmt: RowReduce) -> None:
    src, dst = block.get(stmt.src), block.get(stmt.dst)
    if stmt.op == "max":
        block.put(stmt.dst, np.maximum(dst, src.max(axis=2)))
    else:
        block.put(stmt.dst, dst + src.sum(axis=2))


def _accumulate(block: _Block, stmt: Accumulate) -> None:
    value = block.get(stmt.src)
    if block.buffers[stmt.dst.buffer].is_transposed(block.buffers[stmt.src]):
        value = value.swapaxes(1, 2)
    value = np.broadcast_to(value, (block.lanes, *value.shape[1:]))
    array, index, inner, moved = block.window(stmt.dst, value.shape[1:])
    block.tell(stmt, WRITE, moved)
    batch, head = index[:2]
    if len(set(zip(batch.tolist(), head.tolist(), strict=True))) == block.lanes:
        array[index] += value[inner]
    else:  # several lanes add to one tile
        for lane in range(block.lanes):
            array[(batch[lane], head[lane], *index[2:])] += value[lane][inner[1:]]


def _scatter(block: _Block, stmt: Scatter | ScatterAdd) -> None:
    value = block.get(stmt.src)
    value = np.broadcast_to(value, (block.lanes, *value.shape[1:]))
    scope, target = _Elements(block, block.shape(stmt.src)), block.buffers[stmt.dst]
    index = [evaluate(part, scope) for part in stmt.index]
    block.tell(stmt, WRITE, value.size * target.dtype.bytes)
    if isinstance(stmt, Scatter):
        store_elements(block.arrays[stmt.dst], index, round_to(target.dtype, value), evaluate(stmt.inside, scope))
    else:
        add_elements(block.arrays[stmt.dst], index, value)


RUN: dict[type, Callable[[_Block, Any], None]] = {
    For: _for,
    If: _if,
    Let: _let,
    Note: _note,
    Copy: _copy,
    Fill: _fill,
    Gemm: _gemm,
    Map: _map,
    RowReduce: _row_reduce,
    Accumulate: _accumulate,
    Scatter: _scatter,
    ScatterAdd: _scatter,
}
