"""Sums that are kept transposed: the product of dS and K as that of K^T and dS^T.

A wgmma instruction has 64 rows for each warpgroup, but any multiple of 8 columns: with the columns of K as rows, a
block may have a number of queries that is no multiple of 64. The planner needs to know (dS then lies in shared memory
by rows of queries), and a pass does it.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.graph import remembered
from flashgen.ir.nodes import Buffer, Copy, Gemm, Kernel, Map, Space, Stmt, name_of
from flashgen.ir.visit import rewrite_kernel, statements
from flashgen.plan.plan import Candidate

TRANSPOSED = "dQ transposed"  # a trait of candidates


def as_planned(kernel: Kernel, candidate: Candidate) -> Kernel:
    """The kernel as the candidate keeps its sums."""
    return transpose_sums(kernel) if TRANSPOSED in candidate.traits else kernel


@remembered
def transpose_sums(kernel: Kernel) -> Kernel:
    """The kernel with the register tile that gives a global accumulator its order transposed, and what goes with it.

    That are the tiles made of it element by element, and shared operands of its product that come from registers.
    """
    tiles = {item.layout_of for item in kernel.buffers if item.layout_of}
    every = list(statements(kernel.body))
    for stmt in every:  # in order: what is made of a tile comes behind it
        if isinstance(stmt, Map) and {name_of(place) for place in stmt.reads()} & tiles:
            tiles.add(stmt.dst)
    stored = {name_of(stmt.dst) for stmt in every if isinstance(stmt, Copy) and _to_shared(kernel, stmt)}
    operands = {name for stmt in every if isinstance(stmt, Gemm) and stmt.acc in tiles for name in (stmt.a, stmt.b)}
    turned = tiles | (operands & stored)

    def change(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Gemm) and stmt.acc in tiles:
            a, b = stmt.a in turned, stmt.b in turned  # whose rows are columns now
            return replace(
                stmt, a=stmt.b, b=stmt.a, transpose_a=stmt.transpose_b == b, transpose_b=stmt.transpose_a == a
            )
        if isinstance(stmt, Copy) and _to_shared(kernel, stmt) and (stmt.src in turned) != (stmt.dst in turned):
            return replace(stmt, transpose=True)
        return stmt

    buffers = tuple(_turned(item) if item.name in turned else item for item in kernel.buffers)
    return rewrite_kernel(kernel.having(buffers=buffers), change)


def _to_shared(kernel: Kernel, stmt: Copy) -> bool:
    """True for a copy of a register tile."""
    on_chip = isinstance(stmt.src, str) and isinstance(stmt.dst, str)
    return on_chip and kernel.space(stmt.src) is Space.REGISTER


def _turned(buffer: Buffer) -> Buffer:
    return replace(buffer, shape=buffer.shape[::-1])
