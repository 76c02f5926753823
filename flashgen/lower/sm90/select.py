"""Selection: TILE statements become TMA copies, wgmma and statements on registers; masks take their cheapest form."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.calculus import Term, affine, conjuncts
from flashgen.ir.expr import NEG_INF, Compare, Const, Expr, J, Select, binary, minimum, variables
from flashgen.ir.nodes import Buffer, Copy, Gemm, Kernel, Level, Space, Stmt, Tile, Window, name_of
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.lower.selection import select_shared
from flashgen.machine import base
from flashgen.machine.sm90 import TmaLoad, TmaStore, Wgmma
from flashgen.plan.plan import Plan


def instructions(kernel: Kernel, plan: Plan) -> Kernel:
    """Replace TILE statements by sm90 statements; give buffers their stages and their division among the warps.

    Invariant: no TILE statement but For, If, Let and Note is left; every register buffer has a layout.
    """
    buffers = tuple(_placed(item, plan) for item in kernel.buffers)
    kernel = kernel.having(level=Level.MACHINE, buffers=buffers)
    return rewrite_kernel(kernel, lambda stmt: _select(kernel, stmt))


def _placed(buffer: Buffer, plan: Plan) -> Buffer:
    if buffer.space is Space.SHARED:
        return replace(buffer, stages=plan.stages.get(buffer.name, 1))
    if buffer.space is Space.REGISTER:
        return replace(buffer, warps=(plan.computing_warps, 1))
    return buffer


def _select(kernel: Kernel, stmt: Stmt) -> Stmt | Body:
    match stmt:
        case Copy(src=Window() as window):
            return TmaLoad(Tile(name_of(stmt.dst)), window, note=stmt.note)
        case Copy(dst=Window() as window) if kernel.space(stmt.src) is Space.SHARED:
            return TmaStore(window, Tile(name_of(stmt.src)), note=stmt.note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            return Wgmma(stmt.acc, a, Tile(stmt.b), stmt.transpose_b, stmt.accumulate, note=stmt.note)
    return select_shared(kernel, stmt)


def isolate_columns(kernel: Kernel, plan: Plan) -> Kernel:
    """In masks, bring the limits of a column together as one for each row, with which a constant is compared.

    Two comparisons an element are two branches to the compiler, which then has no registers left for the pipeline.
    Invariant: the mask holds for the same elements as before.
    """

    def change(stmt: Stmt) -> Stmt:
        if isinstance(stmt, base.MapFragment) and isinstance(stmt.expr, Select) and stmt.expr.y == NEG_INF:
            return replace(stmt, expr=replace(stmt.expr, condition=_isolated(stmt.expr.condition)))
        return stmt

    return rewrite_kernel(kernel, change)


def _isolated(condition: Expr) -> Expr:
    """j < min(limits), and what does not limit a column from above."""
    limits: list[Expr] = []
    others: list[Expr] = []
    for compare in conjuncts(condition):
        terms, rest = affine(compare.x, {J.name}) if J.name not in variables(compare.y) else ({}, compare.x)
        if terms.get(J.name) == Term(1, Const(1)) and compare.op in ("<", "<="):
            limit = binary("-", compare.y, rest)
            limits.append(limit + 1 if compare.op == "<=" else limit)
        else:
            others.append(compare)
    first = [Compare("<", J, reduce(minimum, limits))] if limits else []
    return reduce(lambda x, y: x & y, [*first, *others])
