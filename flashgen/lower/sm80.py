"""Instruction selection for the sm80 family: each TILE statement becomes the hardware statement that does it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.nodes import (
    Accumulate,
    Buffer,
    Copy,
    Fill,
    Gemm,
    Kernel,
    Level,
    Space,
    Stmt,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.lower.selection import select_shared
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
        warps = plan.layouts.get(buffer.name) or _rows_layout(kernel, buffer, plan)
        return replace(buffer, warps=warps, copies=plan.copies(buffer.name))
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
        case Copy(src=Window()):
            return replace(_load(kernel, stmt, plan), note=note)
        case Fill(dst=Window() as window):
            return base.ZeroWindow(window, note=note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            flags = (stmt.transpose_a, stmt.transpose_b, stmt.accumulate, stmt.columns)
            return sm80.MmaSync(stmt.acc, a, Tile(stmt.b), *flags, note=note)
        case Accumulate():
            return base.AddFragment(stmt.dst, stmt.src, note=note)
    return select_shared(kernel, stmt)


def _load(kernel: Kernel, stmt: Copy, plan: Plan) -> Stmt:
    """The copy from global memory that fits its target."""
    assert isinstance(stmt.src, Window)
    dst = kernel.buffer(name_of(stmt.dst))
    if dst.space is Space.REGISTER:
        load = base.LoadRows if len(dst.shape) == 1 else base.LoadFragment
        return load(dst.name, stmt.src)
    if len(dst.shape) == 1:
        return sm80.CopyVectorAsync(Tile(dst.name), stmt.src)
    copy = sm80.CopyTileAsync if plan.vector_bytes == 16 else sm80.CopyTileElements
    return copy(Tile(dst.name), stmt.src)
