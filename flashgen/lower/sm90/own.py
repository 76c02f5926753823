"""Blocks of keys by warpgroups: none computes what its own rows do not see."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.calculus import limits
from flashgen.ir.expr import Const, Expr, I, Select, Var, conjuncts, maximum, minimum, substitute, variables
from flashgen.ir.nodes import For, Kernel, Let, Stmt, Tile
from flashgen.ir.visit import Body, inline_lets, rewrite, statements
from flashgen.lower.sm90.roles import in_role
from flashgen.lower.sm90.select import hides
from flashgen.lower.sm90.stages import parity
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import WARPGROUP, WARPGROUP_ROWS, PassOver, Wgmma
from flashgen.plan.plan import Plan

OWN = "of the blocks of this tile those that the rows of this warpgroup see, one in any case"
OTHERS = "what other warpgroups alone see"


def pass_over_others(kernel: Kernel, plan: Plan) -> Kernel:
    """Each warpgroup goes through the blocks of keys that its own rows see, and passes over the others.

    Of 192 rows with a causal mask the last warpgroup sees up to two blocks more than the first.
    Invariant: every warpgroup releases each stage once, and goes through as many steps as the others.
    """
    if not plan.own_blocks:
        return kernel
    return in_role(kernel, "consumer", lambda body: rewrite(body, lambda stmt: _narrowed(kernel, stmt)))


def _narrowed(kernel: Kernel, loop: Stmt) -> Stmt | Body:
    if not isinstance(loop, For):
        return loop
    first, last = _own(kernel, loop)
    if first is None and last is None:
        return loop
    tiles = dict.fromkeys(tile for stmt in loop.body if isinstance(stmt, Wgmma) for tile in _filled(stmt, loop))
    start, stop = loop.start, loop.stop
    result: list[Stmt] = []

    def others(start: Expr, stop: Expr) -> For:
        return For(loop.axis, start, stop, tuple(PassOver(tile, parity(tile)) for tile in tiles), note=OTHERS)

    if first is not None:
        start = Var(f"own_first_{loop.axis}")
        least = minimum(maximum(loop.start, first), maximum(loop.stop - 1, loop.start))
        result += [Let(start.name, least, note=OWN), others(loop.start, start)]
    if last is not None:
        stop = Var(f"own_last_{loop.axis}")
        result.append(Let(stop.name, minimum(loop.stop, maximum(last, start + 1)), note=OWN))
    result.append(replace(loop, start=start, stop=stop))
    return (*result, *((others(stop, loop.stop),) if last is not None else ()))


def _filled(stmt: Wgmma, loop: For) -> list[Tile]:
    """What a product reads that each step of the loop loads."""
    return [tile for tile in stmt.reads() if isinstance(tile, Tile) and loop.axis in variables(tile.stage)]


def _own(kernel: Kernel, loop: For) -> tuple[Expr | None, Expr | None]:
    """The first block that the rows of a warpgroup see, and the one behind the last; None where masks do not say."""
    rows = WARPGROUP * WARPGROUP_ROWS, WARPGROUP * WARPGROUP_ROWS + (WARPGROUP_ROWS - 1)
    lets, found = inline_lets(loop.body), []
    for mask in (stmt for stmt in statements(loop.body) if hides(stmt)):
        assert isinstance(mask, MapFragment) and isinstance(mask.expr, Select)
        ranges = {"i": rows, "j": (Const(0), Var(kernel.buffer(mask.dst).shape[1]) - 1)}
        parts = conjuncts(substitute(mask.expr.condition, lets))
        found += [limits(part, loop.axis, ranges, set()) for part in parts if I.name in variables(part)]
    firsts = [first for first, _ in found if first is not None]
    lasts = [last for _, last in found if last is not None]
    return (reduce(maximum, firsts) if firsts else None, reduce(minimum, lasts) if lasts else None)
