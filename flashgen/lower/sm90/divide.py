"""Divided work: one warpgroup computes P and dV, the other dP, dS and dK, of the same 64 rows of keys.

Both accumulators of a wide head together exceed the registers of a thread. Divided by products, each warpgroup has one,
and its operands P or dS in registers; P alone is needed by both, and goes from one to the other through shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Expr, I, J, Load, rebuild
from flashgen.ir.graph import access
from flashgen.ir.nodes import Buffer, Kernel, Space, Stmt, Tile
from flashgen.ir.visit import Body, rewrite_kernel, statements
from flashgen.machine.base import StoreFragment
from flashgen.machine.sm90 import WARPGROUP_WARPS, HandOver, TakeOver, Wgmma
from flashgen.plan.plan import Plan


def divide_work(kernel: Kernel, plan: Plan) -> Kernel:
    """Give one warpgroup what the first result needs, the other the rest; what both need is handed over.

    Invariant: a register tile is touched by statements of one part alone.
    """
    if not plan.has("divided"):
        return kernel
    first = _first_part(kernel)
    both = sorted(first & _read_by_rest(kernel, first))
    for name in both:
        kernel = _handed_over(kernel, plan, name, first)
    return kernel.having(buffers=tuple(_held(item, first) for item in kernel.buffers))


def _held(buffer: Buffer, first: set[str]) -> Buffer:
    second = buffer.space is Space.REGISTER and buffer.name not in first
    return replace(buffer, first_warp=WARPGROUP_WARPS) if second else buffer


def _local(kernel: Kernel) -> set[str]:
    """Buffers that computing warps fill: register tiles, and shared ones through which results leave."""
    stored = {stmt.dst.buffer for stmt in statements(kernel.body) if isinstance(stmt, StoreFragment)}
    return stored | {item.name for item in kernel.buffers if item.space is Space.REGISTER}


def _first_part(kernel: Kernel) -> set[str]:
    """What the first accumulator is computed from, and what is computed from nothing else."""
    local = _local(kernel)
    every = [stmt for stmt in statements(kernel.body) if not hasattr(stmt, "body")]
    part = {next(stmt.acc for stmt in every if isinstance(stmt, Wgmma) and stmt.accumulate)}
    for stmt in reversed(every):
        if access(stmt).writes & part:
            part |= access(stmt).reads & local
    for stmt in every:
        read = access(stmt).reads & local
        if read and read <= part:
            part |= access(stmt).writes & local
    return part


def _read_by_rest(kernel: Kernel, first: set[str]) -> set[str]:
    local = _local(kernel)
    rest = [stmt for stmt in statements(kernel.body) if access(stmt).writes & local - first]
    return {name for stmt in rest if not hasattr(stmt, "body") for name in access(stmt).reads & local}


def handed_tile(name: str) -> str:
    """The shared tile through which a register tile is handed over."""
    return f"{name}_tile"


def _handed_over(kernel: Kernel, plan: Plan, name: str, first: set[str]) -> Kernel:
    """The kernel with a tile stored behind its last change, and taken before the other part's first look at it."""
    source = kernel.buffer(name)
    shared = Buffer(handed_tile(name), source.shape, source.dtype, Space.SHARED, stages=plan.stages[handed_tile(name)])
    copy = replace(source, name=f"{name}_taken")
    local = _local(kernel)
    every = [stmt for stmt in statements(kernel.body) if not hasattr(stmt, "body")]
    readers = [stmt for stmt in every if name in access(stmt).reads and access(stmt).writes & local - first]
    last = [stmt for stmt in every if name in access(stmt).writes][-1]

    def change(stmt: Stmt) -> Stmt | Body:
        if stmt is last:
            return stmt, HandOver(Tile(shared.name), name, note=f"the other warpgroup needs {name} too")
        if any(stmt is reader for reader in readers):
            own = _renamed(stmt, name, copy.name)
            return (TakeOver(copy.name, Tile(shared.name)), own) if stmt is readers[0] else own
        return stmt

    return rewrite_kernel(kernel.having(buffers=(*kernel.buffers, shared, copy)), change)


def _renamed(stmt: Stmt, old: str, new: str) -> Stmt:
    """The statement with its loads of one register tile from another."""

    def loads(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer == old and expr.index == (I, J):
            return Load(new, expr.index)
        return rebuild(expr, loads)

    return replace(stmt, expr=loads(stmt.expr))  # type: ignore[attr-defined, call-arg]
