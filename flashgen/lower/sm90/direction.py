"""The direction in which a loop walks over blocks of keys."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Const, Var, binary
from flashgen.ir.nodes import For, Kernel, RowReduce, Stmt
from flashgen.ir.visit import rewrite_kernel, substitute_stmt
from flashgen.plan.plan import LAST_FIRST, Plan


def last_block_first(kernel: Kernel, plan: Plan) -> Kernel:
    """Walk from the last block of keys to the first one, where the plan says so.

    With ALiBi the scores of a row rise towards its diagonal: whoever begins there has seen the maximum at once, and may
    guess by it.
    Invariant: the same blocks; no order of them is better than another for the online softmax.
    """
    if not plan.has(LAST_FIRST):
        return kernel

    def change(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, For) or not any(isinstance(inner, RowReduce) for inner in stmt.body):
            return stmt
        last = binary("-", binary("+", stmt.start, stmt.stop), Const(1))
        mirrored = {stmt.axis: binary("-", last, Var(stmt.axis))}
        return replace(stmt, body=tuple(substitute_stmt(inner, mirrored) for inner in stmt.body))

    return rewrite_kernel(kernel, change)
