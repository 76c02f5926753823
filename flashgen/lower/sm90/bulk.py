"""Additions to global memory that hold no warp up, and seldom meet."""

from __future__ import annotations

from flashgen.attention.varlen import ROW_BLOCK
from flashgen.ir.dtype import F32
from flashgen.ir.expr import Var
from flashgen.ir.nodes import Axis, Buffer, Kernel, Let, Space, Stmt, Tile
from flashgen.ir.visit import rewrite_kernel, statements
from flashgen.machine.base import AddFragment
from flashgen.machine.sm90 import ReduceFragment
from flashgen.plan.plan import Plan


def add_in_bulk(kernel: Kernel, plan: Plan) -> Kernel:
    """What is added to global memory goes through shared memory, and from there as bulk copies.

    Invariant: no register tile is added by its threads, which would wait for room in the queue to memory.
    """
    added = {stmt.src for stmt in statements(kernel.body) if isinstance(stmt, AddFragment)}
    parts = [Buffer(part_of(name), kernel.buffer(name).shape, F32, Space.SHARED) for name in sorted(added)]

    def change(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, AddFragment):
            return stmt
        return ReduceFragment(stmt.dst, stmt.src, Tile(part_of(stmt.src)), note=stmt.note)

    return rewrite_kernel(kernel.having(buffers=(*kernel.buffers, *parts)), change)


def heads_side_by_side(kernel: Kernel, plan: Plan) -> Kernel:
    """Blocks of all heads run side by side, not all blocks of one head: they add to other rows; the longest come first.

    Invariant: none; any order of the blocks gives the same sums.
    """
    if not any(isinstance(stmt, ReduceFragment) for stmt in statements(kernel.body)):
        return kernel
    block, head, *rest = kernel.axes
    if block.name == ROW_BLOCK.name:  # of which there may be more than the second axis of a grid has places
        place = Var("place")
        lets = (Let(head.name, place % head.extent), Let(block.name, place // head.extent))
        return kernel.having(axes=(Axis(place.name, block.extent * head.extent),), body=(*lets, *kernel.body))
    return kernel.having(axes=(head, block, *rest))


def part_of(accumulator: str) -> str:
    """The shared tile through which a register tile is added."""
    return accumulator.replace("_acc", "_part")
