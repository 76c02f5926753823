"""Loops: the steps of nested ones are counted through, so that the copy pipeline does not drain in between."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Const, Var, variables
from flashgen.ir.nodes import For, Kernel, Let, Stmt
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.machine.base import Assign, Counter
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


def number(kernel: Kernel, plan: Plan | None = None) -> Kernel:
    """Count the steps of a nested loop through all rounds of the outer loop.

    Where copies are issued by warps of their own the loops can stay as they are, without the division that finds the
    place of a step in a flattened loop.
    Invariant: `step` counts 0, 1, 2 ... over both loops.
    """

    def change(stmt: Stmt) -> Stmt | Body:
        if not (isinstance(stmt, For) and stmt.body and isinstance(stmt.body[-1], For)):
            return stmt
        *bounds, inner = stmt.body
        assert isinstance(inner, For)
        counted = replace(inner, body=(*inner.body, Assign("step", Var("step") + 1)))
        return Counter("step", Const(0)), replace(stmt, body=(*bounds, counted))

    return rewrite_kernel(kernel, change)
