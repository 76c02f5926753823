"""Random numbers: four elements that one thread holds take theirs from one counter."""

from __future__ import annotations

from flashgen.ir.expr import Expr, Random, walk
from flashgen.ir.nodes import Kernel, Stmt
from flashgen.ir.visit import heads_in_tile, rewrite_kernel
from flashgen.machine.base import MapFragment, MapQuads
from flashgen.plan.plan import Plan

PERIOD = 16  # rows and columns of the elements that share counters, and of a matrix instruction


def share_counters(kernel: Kernel, plan: Plan) -> Kernel:
    """Compute random numbers for four elements at a time, those 8 rows and 8 columns apart in 16 x 16.

    Element by element the compiler would find what they share only as long as it has registers to keep it in.
    Invariant: rows of the tile are queries or keys that follow each other from a multiple of 16 on, and so are columns.
    """
    blocks = [size for name, size in plan.sizes.items() if name.startswith("block_")]
    whole = plan.arch.mma[0] % PERIOD == 0 and all(size % PERIOD == 0 for size in blocks)
    if not whole or heads_in_tile(kernel) > 1:
        return kernel

    def change(stmt: Stmt) -> Stmt:
        if isinstance(stmt, MapFragment) and has_random(stmt.expr):
            return MapQuads(stmt.dst, stmt.expr, note=stmt.note)
        return stmt

    return rewrite_kernel(kernel, change)


def has_random(expr: Expr) -> bool:
    return any(isinstance(node, Random) for node in walk(expr))
