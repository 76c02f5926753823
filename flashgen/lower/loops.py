"""Loops: nested ones become one, so that the copy pipeline runs through without draining."""

from __future__ import annotations

from flashgen.ir.expr import Const, Var, variables
from flashgen.ir.nodes import For, Kernel, Let, Stmt
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.plan.plan import Plan


def flatten(kernel: Kernel, plan: Plan | None = None) -> Kernel:
    """A loop that holds only bounds and one inner loop becomes a single loop over the pairs.

    Invariant: the inner bounds do not depend on the outer variable, so the pairs are a rectangle.
    """

    def change(stmt: Stmt) -> Stmt | Body:
        if not (isinstance(stmt, For) and stmt.body and isinstance(stmt.body[-1], For)):
            return stmt
        *bounds, inner = stmt.body
        assert isinstance(inner, For)
        if not all(isinstance(bound, Let) for bound in bounds) or stmt.start != Const(0):
            return stmt
        limits = {name for part in (*bounds, inner) for expr in part.expressions() for name in variables(expr)}
        if stmt.axis in limits:
            return stmt
        count, step = Var(f"{inner.axis}s"), Var("step")
        body = (
            Let(stmt.axis, step // count),
            Let(inner.axis, inner.start + step % count),
            *inner.body,
        )
        return (
            *bounds,
            Let(count.name, inner.stop - inner.start),
            For(step.name, Const(0), stmt.stop * count, body, note=f"{stmt.axis} x {inner.axis}"),
        )

    return rewrite_kernel(kernel, change)
