"""Operands: a register tile feeds a matrix product only where its warps hold the rows that the product needs.

Where the accumulator is divided among the warps otherwise, the operand goes through a shared tile. The planner needs
to know (the tile takes space), and a pass does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashgen.ir.nodes import Buffer, Copy, Gemm, Kernel, Space, Stmt, name_of
from flashgen.ir.visit import Body, rewrite_kernel, statements

Layouts = Mapping[str, tuple[int, int]]


def through_shared(kernel: Kernel, layouts: Layouts) -> Kernel:
    """The kernel with every register operand that does not fit its accumulator's division routed through a tile."""
    for operand in routed(kernel, layouts):
        kernel = _route(kernel, operand)
    return kernel


def routed(kernel: Kernel, layouts: Layouts) -> list[str]:
    """Register operands that the layouts force through shared memory."""
    names = []
    for stmt in statements(kernel.body):
        if not (isinstance(stmt, Gemm) and kernel.space(stmt.a) is Space.REGISTER):
            continue
        if layouts[stmt.a][1] != 1 or layouts[stmt.acc][0] != layouts[stmt.a][0]:
            names.append(stmt.a)
    return list(dict.fromkeys(names))


def shared_twin(kernel: Kernel, operand: str) -> str:
    """The shared tile that holds a register operand: the one that it is copied to already, or a new name."""
    for stmt in statements(kernel.body):
        if isinstance(stmt, Copy) and stmt.src == operand and kernel.space(stmt.dst) is Space.SHARED:
            return name_of(stmt.dst)
    return f"{operand.removesuffix('_operand')}_tile"


def _route(kernel: Kernel, operand: str) -> Kernel:
    tile = shared_twin(kernel, operand)
    source = kernel.buffer(operand)
    copied = any(buffer.name == tile for buffer in kernel.buffers)
    if not copied:
        kernel = kernel.with_buffer(Buffer(tile, source.shape, source.dtype, Space.SHARED))

    def change(stmt: Stmt) -> Stmt | Body:
        if isinstance(stmt, Gemm) and stmt.a == operand:
            product = replace(stmt, a=tile)
            return product if copied else (Copy(tile, operand, note="its readers are other warps"), product)
        return stmt

    return rewrite_kernel(kernel, change)
