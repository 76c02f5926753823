"""The order of the products: softmax runs while the matrix units work."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.dtype import I32
from flashgen.ir.expr import Const, Expr, Var, binary
from flashgen.ir.graph import access, independent
from flashgen.ir.nodes import For, If, Kernel, Let, Scalar, Stmt, Tile
from flashgen.ir.visit import Body, lets_at, rewrite, substitute_stmt
from flashgen.lower.sm90.roles import in_role
from flashgen.lower.sm90.stages import parity
from flashgen.machine.base import ReduceRows
from flashgen.machine.sm90 import FirstTurn, PassTurn, WaitFull, WaitTurn, Wgmma
from flashgen.plan.plan import Plan

FIRST = "first"  # what a loop's first step loads has names of its own
TURNS = "one warpgroup multiplies at a time, under the softmax of the others"


def overlap(kernel: Kernel, plan: Plan) -> Kernel:
    """Issue the next scores before the last product of a step: softmax then runs while the matrix units work.

    Step n of the loop multiplies P of step n - 1 by V behind the scores of step n; the first step has no such product
    and stands before the loop, the last one's stands behind it.
    Invariant: the two products are independent in the dataflow graph.
    """
    changed = in_role(kernel, "consumer", lambda body: rewrite(body, _rotated))
    return kernel if changed == kernel else changed.having(scalars=(*kernel.scalars, Scalar("zero", I32)))


def _rotated(loop: Stmt) -> Stmt | Body:
    if not isinstance(loop, For):
        return loop
    lets = tuple(stmt for stmt in loop.body if isinstance(stmt, Let))
    steps = tuple(stmt for stmt in loop.body if not isinstance(stmt, Let))
    if [at for at, stmt in enumerate(steps) if isinstance(stmt, Wgmma)] != [0, len(steps) - 1]:
        return loop
    first, last = steps[0], steps[-1]
    assert isinstance(last, Wgmma)
    if not independent((first, last), 0, 1) or not any(isinstance(stmt, ReduceRows) for stmt in steps):
        return loop
    middle = _awaiting(steps[1:-1], last)
    some = loop.start < loop.stop
    loaded, _ = lets_at(loop, loop.start, FIRST)
    before = (*loaded, *(at_step(loop, stmt, loop.start) for stmt in (first, *middle)))
    behind = at_step(loop, last, binary("-", Var(loop.axis), Const(1)))
    final = at_step(loop, last, binary("-", loop.stop, Const(1)))
    return (
        If(some, before, note="the first step has no product to overlap with"),
        replace(loop, start=loop.start + 1, body=(*lets, first, behind, *middle)),
        If(some, (final,), note="the product of the last step"),
    )


def _awaiting(middle: Body, last: Wgmma) -> Body:
    """The statements between the products, with the wait for the last one's tile before anything that has to wait for
    the same product of the step before.

    It is not needed before the next step. But the compiler moves a wait for products up to the next branch, past the
    softmax that should run meanwhile, and this wait is a branch. It depends on the sum of P, or P too would be moved.
    """
    own = access(last)
    first = next(at for at, stmt in enumerate(middle) if access(stmt).writes & (own.reads | own.writes))
    total = next(stmt.dst for stmt in middle[:first] if isinstance(stmt, ReduceRows) and stmt.op == "sum")
    waits = tuple(
        WaitFull(tile, parity(tile), behind=total, note="for the next product; by its look at the sum, behind softmax")
        for tile in last.reads()
        if isinstance(tile, Tile)
    )
    return (*middle[:first], *waits, *middle[first:])


def at_step(loop: For, stmt: Stmt, step: Expr) -> Stmt:
    """A statement of a loop as it stands at a step of it; `lets_at` gives what it needs of what the step loads."""
    return substitute_stmt(stmt, lets_at(loop, step, FIRST)[1])


def take_turns(kernel: Kernel, plan: Plan) -> Kernel:
    """The warpgroups issue their products one after the other: the softmax of one then runs under another's products.

    Invariant: all warpgroups go through the loop equally often, so that each turn that is passed is taken.
    """
    if not plan.has("in turns"):
        return kernel

    def change(stmt: Stmt) -> Stmt:
        products = [at for at, inner in enumerate(getattr(stmt, "body", ())) if isinstance(inner, Wgmma)]
        if not (isinstance(stmt, For) and products):
            return stmt
        first, last = products[0], products[-1]
        issue = stmt.body[first : last + 1]
        body = (*stmt.body[:first], WaitTurn(note=TURNS), *issue, PassTurn(), *stmt.body[last + 1 :])
        return replace(stmt, body=body)

    return in_role(kernel, "consumer", lambda body: (FirstTurn(), *rewrite(body, change)))
