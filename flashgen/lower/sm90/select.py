"""Selection: TILE statements become TMA copies, wgmma and statements on registers; masks take their cheapest form."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.calculus import Term, affine, conjuncts
from flashgen.ir.expr import NEG_INF, Compare, Const, Expr, J, Select, binary, maximum, minimum, select
from flashgen.ir.nodes import Accumulate, Buffer, Copy, Gemm, Kernel, Level, Space, Stmt, Tile, Window, name_of
from flashgen.ir.visit import Body, rewrite_kernel
from flashgen.lower.selection import select_shared
from flashgen.machine import base
from flashgen.machine.sm90 import LoadVector, TmaLoad, TmaStore, Wgmma
from flashgen.plan.plan import Plan

OUT_OF_REACH = 1 << 20  # beyond every column of a tile


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
        return replace(buffer, warps=plan.layouts.get(buffer.name, (plan.computing_warps, 1)))
    return buffer


def _select(kernel: Kernel, stmt: Stmt) -> Stmt | Body:
    match stmt:
        case Copy(src=Window() as window) if kernel.space(stmt.dst) is Space.REGISTER:
            return base.LoadRows(name_of(stmt.dst), window, note=stmt.note)
        case Copy(src=Window() as window):
            dst = Tile(name_of(stmt.dst))
            vector = len(kernel.buffer(dst.buffer).shape) == 1
            return LoadVector(dst, window, dst, note=stmt.note) if vector else TmaLoad(dst, window, note=stmt.note)
        case Copy(dst=Window() as window) if kernel.space(stmt.src) is Space.SHARED:
            return TmaStore(window, Tile(name_of(stmt.src)), note=stmt.note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            flags = (stmt.transpose_b, stmt.accumulate, stmt.transpose_a)
            return Wgmma(stmt.acc, a, Tile(stmt.b), *flags, note=stmt.note)
        case Accumulate():
            return base.AddFragment(stmt.dst, stmt.src, note=stmt.note)
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
    """j < min(limits), or j >= max(limits) where those are the only ones, and what limits no column.

    With a limit from below, what limits no column moves it out of reach where it does not hold.
    """
    above: list[Expr] = []
    below: list[Expr] = []
    others: list[Expr] = []
    for compare in conjuncts(condition):
        kind, limit = _limit(compare)
        {"above": above, "below": below}.get(kind, others).append(limit)
    if below and not above:
        limit = reduce(maximum, below)
        if others:
            limit = select(reduce(lambda x, y: x & y, others), limit, Const(OUT_OF_REACH))
        return Compare(">=", J, limit)
    first = [Compare("<", J, reduce(minimum, above))] if above else []
    second = [Compare(">=", J, reduce(maximum, below))] if below else []
    return reduce(lambda x, y: x & y, [*first, *second, *others])


def _limit(compare: Compare) -> tuple[str, Expr]:
    """ "above" and x for j < x, "below" and x for j >= x, or "" and the comparison itself."""
    left, left_rest = affine(compare.x, {J.name})
    right, right_rest = affine(compare.y, {J.name})
    one = Term(1, Const(1))
    if compare.op not in ("<", "<=") or (J.name in left) == (J.name in right):
        return "", compare
    if left.get(J.name) == one:
        limit = binary("-", right_rest, left_rest)
        return "above", limit + 1 if compare.op == "<=" else limit
    if right.get(J.name) == one:
        limit = binary("-", left_rest, right_rest)
        return "below", limit if compare.op == "<=" else limit + 1
    return "", compare
