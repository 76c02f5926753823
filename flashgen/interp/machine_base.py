"""The meaning of the statements of machine/base.py for one warp."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flashgen.interp.common import add_elements, evaluate, round_to, store_elements
from flashgen.interp.fragments import LANES, Elements, agreed, by_lane, columns_of, get, hazard, rows_of
from flashgen.interp.warps import Block, Meaning, Steps, Warp
from flashgen.ir.expr import Expr
from flashgen.machine import base

PIECE_BYTES = 16


@lru_cache(maxsize=1024)
def share(rows: int, columns: int, element: int, threads: int, warp: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the elements that a warp moves: 16-byte pieces in row order are divided over all threads."""
    width = PIECE_BYTES // element
    row, piece = np.divmod(np.arange(rows * columns // width), columns // width)
    mine = np.arange(len(row)) % threads // 32 == warp
    columns_of_piece = piece[mine][:, None] * width + np.arange(width)
    return np.broadcast_to(row[mine][:, None], columns_of_piece.shape), columns_of_piece


def tile_share(block: Block, warp: Warp, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The share of a warp in a copy of a tile."""
    rows, columns = block.shape(name)
    return share(rows, columns, block.buffers[name].dtype.bytes, block.plan.computing_threads, warp.index)


def _barrier(block: Block, warp: Warp, stmt: base.Barrier) -> Steps:
    yield from block.meet(warp, stmt)


def _assign(block: Block, warp: Warp, stmt: Any, expr: Expr) -> None:
    scope = Elements(block, warp, stmt, stmt.dst)
    value = scope.evaluate(expr)
    warp.registers[stmt.dst] = value if scope.whole else round_to(block.buffers[stmt.dst].dtype, value)
    block.trace.elementwise(block.plan.arch, expr, value.size)


def _fill(block: Block, warp: Warp, stmt: base.FillFragment) -> None:
    _assign(block, warp, stmt, stmt.value)


def _map(block: Block, warp: Warp, stmt: base.MapFragment | base.PackFragment) -> None:
    _assign(block, warp, stmt, stmt.expr)


def _reduce_rows(block: Block, warp: Warp, stmt: base.ReduceRows) -> None:
    dst, src = block.buffers[stmt.dst], block.buffers[stmt.src]
    assert dst.warps is not None and src.warps is not None
    if dst.warps[0] != src.warps[0]:
        raise hazard(warp, stmt, f"{dst.name} ({dst.warps}) and {src.name} ({src.warps}) hold different rows")
    columns = by_lane(get(warp, stmt, stmt.src))
    old = get(warp, stmt, stmt.dst)
    warp.registers[stmt.dst] = np.maximum(old, columns.max(axis=2)) if stmt.op == "max" else old + columns.sum(axis=2)
    block.trace.spend("alu", columns.size / 128)


def _combine_lanes(block: Block, warp: Warp, stmt: base.CombineLanes) -> None:
    value = get(warp, stmt, stmt.dst)
    combined = value.max(axis=1) if stmt.op == "max" else value.sum(axis=1)
    warp.registers[stmt.dst] = np.repeat(combined[:, None], LANES, axis=1)
    block.trace.spend("shared", 2 * value.size / 32)  # two shuffles, each 32 lanes a clock


def _store_fragment(block: Block, warp: Warp, stmt: base.StoreFragment) -> None:
    value = get(warp, stmt, stmt.src)
    rows, columns = rows_of(block, warp, stmt.src)[:, None], columns_of(block, warp, stmt.src)
    if isinstance(stmt, base.StoreTransposed):
        rows, columns = columns, rows
    block.shared.write(block.access(warp, stmt, stmt.dst), value, rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(stmt.dst.buffer, value.size))


def _store_tile(block: Block, warp: Warp, stmt: base.StoreTile) -> None:
    name = stmt.src.buffer
    rows, columns = tile_share(block, warp, name)
    value = block.shared.read(block.access(warp, stmt, stmt.src), rows, columns)
    block.store(warp, stmt.dst, block.shape(name), value, rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(name, value.size))


def _load_rows(block: Block, warp: Warp, stmt: base.LoadRows) -> None:
    value = block.load(warp, stmt.src, block.shape(stmt.dst), rows_of(block, warp, stmt.dst))
    warp.registers[stmt.dst] = np.repeat(value[:, None], LANES, axis=1)


def _store_rows(block: Block, warp: Warp, stmt: base.StoreRows) -> None:
    """Several warps may hold the same rows: they must agree on what they store."""
    value, rows = agreed(warp, stmt, stmt.src), rows_of(block, warp, stmt.src)
    left = () if stmt.dst.rows is None else (warp.uniform(stmt.dst.rows),)  # a tile of no rows is another one
    place = (stmt.dst.buffer, *(warp.uniform(expr) for expr in stmt.dst.origin), *left, int(rows[0]))
    earlier = block.stored.setdefault(place, value)
    if not np.array_equal(earlier, value, equal_nan=True):
        raise hazard(warp, stmt, f"another warp stored other values to the same rows of {stmt.dst.buffer}")
    block.store(warp, stmt.dst, block.shape(stmt.src), value, rows)


def _ordered(block: Block, stmt: Any, accumulator: str, name: str) -> None:
    """Notes which register tile gives a global accumulator its order."""
    warps = block.buffers[name].warps
    assert warps is not None
    if block.buffers[accumulator].layout_of not in ("", name):
        raise ValueError(f"{accumulator} is kept in the order of {block.buffers[accumulator].layout_of}, not of {name}")
    block.trace.fragment_orders[accumulator] = (block.shape(name), warps)


def _add_fragment(block: Block, warp: Warp, stmt: base.AddFragment) -> None:
    _ordered(block, stmt, stmt.dst.buffer, stmt.src)
    value = get(warp, stmt, stmt.src)
    shape, rows, columns = _place_in(block, warp, stmt.dst.buffer, stmt.src)
    block.store(warp, stmt.dst, shape, value, rows, columns, add=True)


def _load_fragment(block: Block, warp: Warp, stmt: base.LoadFragment) -> None:
    _ordered(block, stmt, stmt.src.buffer, stmt.dst)
    shape, rows, columns = _place_in(block, warp, stmt.src.buffer, stmt.dst)
    warp.registers[stmt.dst] = block.load(warp, stmt.src, shape, rows, columns)


def _place_in(block: Block, warp: Warp, accumulator: str, name: str) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """The shape of a tile of a global accumulator, and where in it the elements of a register tile lie."""
    shape, rows, columns = block.shape(name), rows_of(block, warp, name)[:, None], columns_of(block, warp, name)
    if block.buffers[accumulator].is_transposed(block.buffers[name]):
        return shape[::-1], columns, rows
    return shape, rows, columns


def _zero_window(block: Block, warp: Warp, stmt: base.ZeroWindow) -> None:
    buffer = block.buffers[stmt.dst.buffer]
    shape = block.shape(buffer.layout_of)
    rows, columns = share(*shape, buffer.dtype.bytes, block.plan.computing_threads, warp.index)
    block.store(warp, stmt.dst, shape, np.zeros(rows.shape, np.float32), rows, columns)


def _store_elements(block: Block, warp: Warp, stmt: base.StoreElements) -> None:
    scope, dtype = Elements(block, warp, stmt, stmt.src), block.buffers[stmt.dst].dtype
    value = get(warp, stmt, stmt.src)
    index = [evaluate(part, scope) for part in stmt.index]
    store_elements(block.arrays[stmt.dst], index, round_to(dtype, value), evaluate(stmt.inside, scope))
    block.trace.global_bytes_written += value.size * dtype.bytes


def _add_elements(block: Block, warp: Warp, stmt: base.AddElements) -> None:
    """Of a row vector one lane adds what all that hold a row agree on."""
    scope = Elements(block, warp, stmt, stmt.src)
    value = get(warp, stmt, stmt.src) if scope.is_tile else agreed(warp, stmt, stmt.src)[:, None]
    index = [evaluate(part, scope) for part in stmt.index]
    add_elements(block.arrays[stmt.dst], index, value)
    block.trace.global_bytes_written += value.size * block.buffers[stmt.dst].dtype.bytes


def _count(block: Block, warp: Warp, stmt: base.Counter | base.Assign) -> None:
    warp.names[stmt.name] = warp.uniform(stmt.value)


def _while(block: Block, warp: Warp, stmt: base.WhileLoop) -> Steps:
    while warp.uniform(stmt.condition):
        yield from block.steps(warp, stmt.body)


RUN: dict[type, Meaning] = {
    base.Counter: _count,
    base.Assign: _count,
    base.WhileLoop: _while,
    base.Barrier: _barrier,
    base.FillFragment: _fill,
    base.MapFragment: _map,
    base.MapQuads: _map,
    base.PackFragment: _map,
    base.ReduceRows: _reduce_rows,
    base.CombineLanes: _combine_lanes,
    base.StoreFragment: _store_fragment,
    base.StoreTransposed: _store_fragment,
    base.StoreTile: _store_tile,
    base.LoadRows: _load_rows,
    base.StoreRows: _store_rows,
    base.AddFragment: _add_fragment,
    base.LoadFragment: _load_fragment,
    base.ZeroWindow: _zero_window,
    base.StoreElements: _store_elements,
    base.AddElements: _add_elements,
}
