"""Which grid axes the tile interpreter turns into array dimensions, and how many of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from flashgen.interp.common import cdiv
from flashgen.ir.expr import Expr, variables
from flashgen.ir.nodes import For, If, Kernel, Let, Space, Stmt, Tile, Window
from flashgen.ir.visit import statements

WORKING_SET = 16 << 20  # bytes of on-chip values that are alive at once: larger falls out of a CPU's caches


def vectorisable(kernel: Kernel) -> set[str]:
    """Grid axes that decide nothing but which (batch, head) is read and written, and values within Maps."""
    depends: dict[str, set[str]] = {axis.name: {axis.name} for axis in kernel.axes}
    control: set[str] = set()

    def axes_of(expr: Expr) -> set[str]:
        return set().union(*(depends.get(name, set()) for name in variables(expr)))

    for stmt in statements(kernel.body):
        if isinstance(stmt, Let):
            depends[stmt.name] = depends.get(stmt.name, set()) | axes_of(stmt.value)
        for expr in _control(stmt):
            control |= axes_of(expr)
    return {axis.name for axis in kernel.axes} - control


def _control(stmt: Stmt) -> Iterator[Expr]:
    """Expressions that must be one number for all lanes: branches, loop bounds, stages, rows and columns of windows."""
    if isinstance(stmt, For):
        yield from (stmt.start, stmt.stop)
    if isinstance(stmt, If):
        yield stmt.condition
    for place in (*stmt.writes(), *stmt.reads()):
        if isinstance(place, Window):
            yield from place.origin[2:]
            yield from () if place.rows is None else (place.rows,)
        if isinstance(place, Tile):
            yield place.stage


def lanes_of(extents: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Axis name -> its value in each lane. Kernels list the slowest axis last; lanes go through memory in order."""
    grid = np.indices(tuple(extents.values()))
    return {name: grid[k].ravel() for k, name in enumerate(extents)}


def chunks(lanes: dict[str, np.ndarray], lane_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """The lanes in equal parts whose values fit the working set together."""
    if not lanes:
        yield {}
        return
    count = len(next(iter(lanes.values())))
    parts = cdiv(count * lane_bytes, WORKING_SET)
    for part in range(parts if count else 0):
        window = slice(part * count // parts, (part + 1) * count // parts)
        if window.stop > window.start:
            yield {name: values[window] for name, values in lanes.items()}


def lane_bytes(kernel: Kernel, dims: Mapping[str, int]) -> int:
    on_chip = (buffer for buffer in kernel.buffers if buffer.space is not Space.GLOBAL)
    return sum(4 * math.prod(dims[name] for name in buffer.shape) for buffer in on_chip) + 1
