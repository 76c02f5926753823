"""Instruction selection for the sm80 family: each TILE statement becomes the hardware statement that does it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Cast
from flashgen.ir.nodes import (
    Accumulate,
    Buffer,
    Copy,
    Fill,
    Gemm,
    Kernel,
    Level,
    Map,
    RowReduce,
    Space,
    Stmt,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.machine import base, sm80
from flashgen.plan.plan import Plan


def select(kernel: Kernel, plan: Plan) -> Kernel:
    """Replace TILE statements by sm80 statements; give buffers their stages and their division among the warps.

    Invariant: no TILE statement but For, If, Let and Note is left; every register buffer has a layout.
    """
    kernel = kernel.having(level=Level.MACHINE, buffers=tuple(_placed(kernel, item, plan) for item in kernel.buffers))
    return rewrite_kernel(kernel, lambda stmt: _select(kernel, stmt, plan))


def _placed(kernel: Kernel, buffer: Buffer, plan: Plan) -> Buffer:
    if buffer.space is Space.SHARED:
        return replace(buffer, stages=plan.stages.get(buffer.name, 1))
    if buffer.space is Space.REGISTER:
        return replace(buffer, warps=plan.layouts.get(buffer.name) or _rows_layout(kernel, buffer, plan))
    return buffer


def _rows_layout(kernel: Kernel, buffer: Buffer, plan: Plan) -> tuple[int, int]:
    """A row vector is divided like the rows of the tiles that have those rows."""
    for other in kernel.buffers:
        layout = plan.layouts.get(other.name)
        if layout and len(other.shape) == 2 and other.shape[0] == buffer.shape[0]:
            return layout[0], 1
    raise KeyError(f"plan for {kernel.name} gives no layout for {buffer.name}")


def _select(kernel: Kernel, stmt: Stmt, plan: Plan) -> Stmt | Body:
    note = stmt.note
    match stmt:
        case Copy():
            return replace(_copy(kernel, stmt, plan), note=note)
        case Fill(dst=Window() as window):
            return base.ZeroWindow(window, note=note)
        case Fill(dst=str() as fragment):
            return base.FillFragment(fragment, stmt.value, note=note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            flags = (stmt.transpose_a, stmt.transpose_b, stmt.accumulate)
            return sm80.MmaSync(stmt.acc, a, Tile(stmt.b), *flags, note=note)
        case Map(expr=Cast(x=value)) if kernel.buffer(stmt.dst).dtype.bytes == 2:
            return base.PackFragment(stmt.dst, value, note=note)
        case Map():
            return base.MapFragment(stmt.dst, stmt.expr, note=note)
        case RowReduce():
            return base.ReduceRows(stmt.dst, stmt.op, stmt.src, note=note), base.CombineLanes(stmt.dst, stmt.op)
        case Accumulate():
            return base.AddFragment(stmt.dst, stmt.src, note=note)
    return stmt


def _copy(kernel: Kernel, stmt: Copy, plan: Plan) -> Stmt:
    """The copy that fits the two places."""
    dst, src = kernel.buffer(name_of(stmt.dst)), kernel.buffer(name_of(stmt.src))
    if isinstance(stmt.src, Window):
        if dst.space is Space.REGISTER:
            load = base.LoadRows if len(dst.shape) == 1 else base.LoadFragment
            return load(dst.name, stmt.src)
        if len(dst.shape) == 1:
            return sm80.CopyVectorAsync(Tile(dst.name), stmt.src)
        copy = sm80.CopyTileAsync if plan.vector_bytes == 16 else sm80.CopyTileElements
        return copy(Tile(dst.name), stmt.src)
    if isinstance(stmt.dst, Window):
        if src.space is Space.REGISTER:
            return base.StoreRows(stmt.dst, src.name)
        return base.StoreTile(stmt.dst, Tile(src.name))
    return base.StoreFragment(Tile(dst.name), src.name)
