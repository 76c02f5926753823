"""Tiles that expressions read: each warp loads its part as the accumulators lie, 8 x 8 matrices at a time."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Expr, I, J, Load, rebuild, walk
from flashgen.ir.nodes import Buffer, For, Kernel, Space, Stmt, Tile
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import LoadMatrix
from flashgen.plan.plan import Plan

ELEMENT = ((I, J), (J, I))


def load_matrices(kernel: Kernel, plan: Plan) -> Kernel:
    """Load what expressions read of shared tiles into registers, ahead of the first that reads it.

    A matrix of 16-bit elements lands as an accumulator's: lane l has row l / 4, columns 2 (l % 4) and the next.
    Invariant: no expression reads a shared tile of rows and columns.
    """
    added: dict[str, Buffer] = {}

    def change(stmt: Stmt) -> Stmt:
        return replace(stmt, body=_loaded(kernel, stmt.body, added)) if isinstance(stmt, For) else stmt

    changed = rewrite_kernel(kernel, change)
    return changed.having(buffers=(*changed.buffers, *added.values()))


def _loaded(kernel: Kernel, body: Body, added: dict[str, Buffer]) -> Body:
    """The body of a loop; the registers that its matrices take are put into `added`."""
    result: list[Stmt] = []
    seen: set[str] = set()
    for stmt in body:
        if isinstance(stmt, MapFragment):
            dst = kernel.buffer(stmt.dst)
            for load in dict.fromkeys(node for node in walk(stmt.expr) if _of_tile(kernel, node)):
                tile = kernel.buffer(load.buffer)  # type: ignore[attr-defined]
                name = _values(tile.name)
                if name not in seen:
                    seen.add(name)
                    added[name] = Buffer(name, dst.shape, tile.dtype, Space.REGISTER, warps=dst.warps)
                    result.append(LoadMatrix(name, Tile(tile.name), load.index == (J, I)))  # type: ignore[attr-defined]
            stmt = replace(stmt, expr=_from_registers(kernel, stmt.expr))
        result.append(stmt)
    return tuple(result)


def _of_tile(kernel: Kernel, expr: Expr) -> bool:
    if not isinstance(expr, Load) or expr.index not in ELEMENT:
        return False
    return kernel.space(expr.buffer) is Space.SHARED


def _values(tile: str) -> str:
    return f"{tile.removesuffix('_tile')}_values"


def _from_registers(kernel: Kernel, expr: Expr) -> Expr:
    if _of_tile(kernel, expr):
        return Load(_values(expr.buffer), (I, J))  # type: ignore[attr-defined]
    return rebuild(expr, lambda part: _from_registers(kernel, part))
