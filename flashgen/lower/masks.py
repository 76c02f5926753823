"""Masks: blocks without a visible element are skipped, wholly visible ones are not masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from flashgen.calculus import Ranges, limits, loop_limits, somewhere_hidden
from flashgen.ir.expr import NEG_INF, Const, Expr, I, J, Load, Select, Var, conjuncts, substitute
from flashgen.ir.nodes import For, If, Kernel, Let, Map, Stmt
from flashgen.ir.visit import Body, inline_lets, rewrite_kernel, statements
from flashgen.plan.plan import Plan

ON_BOUNDARY = "only tiles on a boundary are masked"


def skip_blocks(kernel: Kernel, plan: Plan | None = None) -> Kernel:
    """Tighten loops over blocks to those with a visible element.

    Limits that depend on the variable of another loop are left out: such loops are counted through as a rectangle.
    Invariant: an iteration that is dropped would have masked every element of its score tile.
    """
    loops = frozenset(stmt.axis for stmt in statements(kernel.body) if isinstance(stmt, For))

    def change(stmt: Stmt) -> Stmt | Body:
        if not isinstance(stmt, For):
            return stmt
        start, stop = stmt.start, stmt.stop
        lets = inline_lets(stmt.body)
        for mask in _masks(stmt.body):
            expr = substitute(_condition(mask), lets)
            start, stop = loop_limits(expr, stmt.axis, _ranges(kernel, mask), start, stop, loops - {stmt.axis})
        if (start, stop) == (stmt.start, stmt.stop):
            return stmt
        first, last = f"first_{stmt.axis}", f"last_{stmt.axis}"
        bounds: list[Stmt] = []
        if start != stmt.start:
            bounds.append(Let(first, start, note="earlier blocks see nothing"))
            start = Var(first)
        if stop != stmt.stop:
            bounds.append(Let(last, stop, note="later blocks are not seen"))
            stop = Var(last)
        return (*bounds, replace(stmt, start=start, stop=stop))

    return rewrite_kernel(kernel, change)


def guard_masks(kernel: Kernel, plan: Plan | None = None) -> Kernel:
    """Mask only tiles on a boundary, where it is known which these are.

    Invariant: where the guard does not hold, the mask is true for every element of the tile.
    """

    def change(stmt: Stmt) -> Stmt:
        if not is_mask(stmt):
            return stmt
        assert isinstance(stmt, Map)
        guard = somewhere_hidden(_condition(stmt), _ranges(kernel, stmt))
        if guard is None:
            return replace(stmt, note="no tile is known to be wholly visible")
        return If(guard, (replace(stmt, note=""),), note=ON_BOUNDARY)

    return rewrite_kernel(kernel, change)


def mask_sides(kernel: Kernel, plan: Plan | None = None) -> Kernel:
    """Mask tiles on a left boundary by themselves, and those on a right one.

    Invariant: both guards hold for no tile but where the one of both did, and the masks together are that one.
    """

    def change(stmt: Stmt) -> Stmt | Body:
        if not (isinstance(stmt, If) and stmt.note == ON_BOUNDARY):
            return stmt
        (mask,) = stmt.body
        assert isinstance(mask, Map) and isinstance(mask.expr, Select)
        sides, ranges = _sides(mask.expr.condition, _ranges(kernel, mask)), _ranges(kernel, mask)
        guards = [somewhere_hidden(side, ranges) for side in sides]
        if len(sides) == 1 or None in guards:
            return stmt
        masked = (replace(mask, expr=replace(mask.expr, condition=side)) for side in sides)
        return tuple(
            replace(stmt, condition=guard, body=(inner,))  # type: ignore[arg-type]
            for guard, inner in zip(guards, masked, strict=True)
        )

    return rewrite_kernel(kernel, change)


def _sides(condition: Expr, ranges: Ranges) -> tuple[Expr, ...]:
    """What ends the columns of a row, and what begins them, where the condition is nothing else: of a window's tiles
    few are on both boundaries, and one comparison an element does for the others (head_dim 64: 1 to 6 % of the time).
    """
    ending: list[Expr] = []
    beginning: list[Expr] = []
    for part in conjuncts(condition):
        first, last = limits(part, J.name, {I.name: ranges[I.name]}, set())
        if (first is None) == (last is None):
            return (condition,)
        (ending if first is None else beginning).append(part)
    return tuple(reduce(lambda x, y: x & y, side) for side in (ending, beginning) if side)


def is_mask(stmt: Stmt) -> bool:
    """True for s = select(visible, s, -inf)."""
    if not (isinstance(stmt, Map) and isinstance(stmt.expr, Select) and len(stmt.note) > 0):
        return False
    return stmt.expr.x == Load(stmt.dst, (I, J)) and stmt.expr.y == NEG_INF


def _masks(body: Body) -> Iterator[Map]:
    """The masks directly in a loop's body (an inner loop has tightened itself by its own)."""
    for stmt in body:
        if is_mask(stmt):
            assert isinstance(stmt, Map)
            yield stmt


def _condition(stmt: Map) -> Expr:
    assert isinstance(stmt.expr, Select)
    return stmt.expr.condition


def _ranges(kernel: Kernel, stmt: Map) -> Ranges:
    """Tile coordinates and their ranges."""
    shape = kernel.buffer(stmt.dst).shape
    return {name: (Const(0), Var(dim) - 1) for name, dim in zip("ij", shape, strict=True)}
