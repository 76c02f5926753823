"""Selection: TILE statements become TMA copies, wgmma and statements on registers; masks take their cheapest form."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.calculus import affine, orders
from flashgen.ir.expr import (
    NEG_INF,
    Binary,
    Compare,
    Const,
    Expr,
    J,
    Select,
    binary,
    maximum,
    minimum,
    select,
    text,
    variables,
)
from flashgen.ir.nodes import Accumulate, Buffer, Copy, Gemm, Kernel, Level, Space, Stmt, Tile, Window, name_of
from flashgen.ir.visit import Body, rewrite_kernel, statements
from flashgen.lower.selection import select_shared
from flashgen.machine import base
from flashgen.machine.sm90 import LoadVector, TmaLoad, TmaStore, Wgmma
from flashgen.plan.plan import Plan

OUT_OF_REACH = 1 << 20  # beyond every column of a tile


def instructions(kernel: Kernel, plan: Plan) -> Kernel:
    """Replace TILE statements by sm90 statements; give buffers their stages and their division among the warps.

    Invariant: no TILE statement but For, If, Let and Note is left; every register buffer has a layout.
    """
    buffers = tuple(_placed(kernel, item, plan) for item in kernel.buffers)
    kernel = kernel.having(level=Level.MACHINE, buffers=buffers)
    return rewrite_kernel(kernel, lambda stmt: _select(kernel, stmt))


def _placed(kernel: Kernel, buffer: Buffer, plan: Plan) -> Buffer:
    if buffer.space is Space.SHARED:
        return replace(buffer, stages=plan.stages.get(buffer.name, 1))
    if buffer.space is Space.REGISTER:
        warps = plan.layouts.get(buffer.name) or (_warps_along_rows(kernel, buffer, plan), 1)
        return replace(buffer, warps=warps, copies=plan.copies(buffer.name))
    return buffer


def _warps_along_rows(kernel: Kernel, buffer: Buffer, plan: Plan) -> int:
    """Of a row vector: those that divide the rows of the scores, where several have the same ones."""
    scores = next((item for item in kernel.buffers if plan.copies(item.name) > 1), None)
    return plan.computing_warps if scores is None else plan.layouts[scores.name][0]


def _select(kernel: Kernel, stmt: Stmt) -> Stmt | Body:
    match stmt:
        case Copy(src=Window() as window) if kernel.space(stmt.dst) is Space.REGISTER:
            return base.LoadRows(name_of(stmt.dst), window, note=stmt.note)
        case Copy(src=Window() as window):
            dst = Tile(name_of(stmt.dst))
            vector = len(kernel.buffer(dst.buffer).shape) == 1
            return LoadVector(dst, window, dst, note=stmt.note) if vector else TmaLoad(dst, window, note=stmt.note)
        case Copy(dst=Window() as window) if kernel.space(stmt.src) is Space.SHARED:
            return TmaStore(window, Tile(name_of(stmt.src)), _across(kernel, name_of(stmt.src)), note=stmt.note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            flags = (stmt.transpose_b, stmt.accumulate, stmt.transpose_a, stmt.columns)
            return Wgmma(stmt.acc, a, Tile(stmt.b), *flags, note=stmt.note)
        case Accumulate():
            return base.AddFragment(stmt.dst, stmt.src, note=stmt.note)
    return select_shared(kernel, stmt)


def _across(kernel: Kernel, tile: str) -> int | None:
    """Warpgroups that store columns of a tile, each its own; None where they store rows."""
    sources = (stmt.src for stmt in statements(kernel.body) if isinstance(stmt, Copy) and stmt.dst == tile)
    warps = next((kernel.buffer(source).warps for source in sources if isinstance(source, str)), None)
    return warps[1] if warps and warps[1] > 1 else None


def isolate_columns(kernel: Kernel, plan: Plan) -> Kernel:
    """In masks, bring the limits of a column together as one for each row, with which a constant is compared.

    Two comparisons an element are two branches to the compiler, which then has no registers left for the pipeline.
    Invariant: the mask holds for the same elements as before.
    """

    def change(stmt: Stmt) -> Stmt:
        if hides(stmt):
            assert isinstance(stmt, base.MapFragment) and isinstance(stmt.expr, Select)
            return replace(stmt, expr=replace(stmt.expr, condition=_joined(_parts(stmt.expr.condition))))
        return stmt

    return rewrite_kernel(kernel, change)


def hides(stmt: Stmt) -> bool:
    """True for s = select(visible, s, -inf)."""
    return isinstance(stmt, base.MapFragment) and isinstance(stmt.expr, Select) and stmt.expr.y == NEG_INF


Part = tuple[str, Expr]  # "above" and x for j < x, "below" and x for j >= x, or "" and another condition


def _parts(condition: Expr) -> list[Part]:
    """The parts whose conjunction the condition is."""
    if isinstance(condition, Binary) and condition.op == "&":
        return _parts(condition.x) + _parts(condition.y)
    if isinstance(condition, Binary) and condition.op == "|":
        one, other = _parts(condition.x), _parts(condition.y)
        kinds = {kind for kind, _ in (*one, *other)}
        if len(one) == len(other) == len(kinds) == 1 and kinds != {""}:
            widest = maximum if kinds == {"above"} else minimum
            return [(one[0][0], widest(one[0][1], other[0][1]))]
        return [("", _joined(one) | _joined(other))]
    if not isinstance(condition, Compare) or J.name not in variables(condition):
        return [("", condition)]
    try:
        return [_limit(compare) for compare in orders(condition, J.name)]
    except ValueError:
        return [("", condition)]


def _joined(parts: list[Part]) -> Expr:
    """j < min(limits) and j >= max(limits), and what else there is.

    What limits no column moves a limit out of reach where it does not hold.
    """
    above = [limit for kind, limit in parts if kind == "above"]
    below = [limit for kind, limit in parts if kind == "below"]
    others = [condition for kind, condition in parts if not kind]
    limits = [Compare("<", J, reduce(minimum, above))] if above else []
    limits += [Compare(">=", J, reduce(maximum, below))] if below else []
    of_rows = [condition for condition in others if J.name not in variables(condition)]
    if limits and of_rows:
        last = limits.pop()
        out_of_reach = Const(0 if last.op == "<" else OUT_OF_REACH)
        limits.append(replace(last, y=select(reduce(lambda x, y: x & y, of_rows), last.y, out_of_reach)))
        others = [condition for condition in others if condition not in of_rows]
    return reduce(lambda x, y: x & y, [*limits, *others])


def _limit(compare: Compare) -> Part:
    """The limit of j in a comparison of order; ValueError where there is none."""
    low, high = (compare.x, compare.y) if compare.op in ("<", "<=") else (compare.y, compare.x)
    left, left_rest = affine(low, {J.name})
    right, right_rest = affine(high, {J.name})
    if (J.name in left) == (J.name in right):
        raise ValueError(f"{text(compare)} limits no column")
    term = {**left, **right}[J.name]
    if term.factor != Const(1):
        raise ValueError(f"{text(compare)} limits a multiple of the column")
    if (term.sign > 0) == (J.name in left):  # j < high - low
        limit = binary("-", right_rest, left_rest)
        return "above", limit if compare.op in ("<", ">") else limit + 1
    limit = binary("-", left_rest, right_rest)
    return "below", limit + 1 if compare.op in ("<", ">") else limit
