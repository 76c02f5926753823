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

OWN = "behind the last block that the rows of this warpgroup see, or the first one"
OTHERS = "what other warpgroups alone see"


def stop_early(kernel: Kernel, plan: Plan) -> Kernel:
    """Each warpgroup ends with the last block of keys that its rows see, and passes over those behind it.

    Of 192 rows with a causal mask the last warpgroup sees up to two blocks more than the first.
    Invariant: every warpgroup releases each stage once, and goes through as many steps as the others.
    """
    if not plan.own_blocks:
        return kernel
    return in_role(kernel, "consumer", lambda body: rewrite(body, lambda stmt: _stopped(kernel, stmt)))


def _stopped(kernel: Kernel, loop: Stmt) -> Stmt | Body:
    if not isinstance(loop, For):
        return loop
    last = _last(kernel, loop)
    tiles = dict.fromkeys(
        tile
        for stmt in loop.body
        if isinstance(stmt, Wgmma)
        for tile in stmt.reads()
        if isinstance(tile, Tile) and loop.axis in variables(tile.stage)
    )
    if last == loop.stop or not tiles:
        return loop
    own = Var(f"own_last_{loop.axis}")
    return (
        Let(own.name, last, note=OWN),
        replace(loop, stop=own),
        For(loop.axis, own, loop.stop, tuple(PassOver(tile, parity(tile)) for tile in tiles), note=OTHERS),
    )


def _last(kernel: Kernel, loop: For) -> Expr:
    """The block behind the last one that the rows of a warpgroup see, but the first one at least; where masks do not
    say, that of the loop."""
    rows = WARPGROUP * WARPGROUP_ROWS, WARPGROUP * WARPGROUP_ROWS + (WARPGROUP_ROWS - 1)
    lets, found = inline_lets(loop.body), []
    for mask in (stmt for stmt in statements(loop.body) if hides(stmt)):
        assert isinstance(mask, MapFragment) and isinstance(mask.expr, Select)
        ranges = {"i": rows, "j": (Const(0), Var(kernel.buffer(mask.dst).shape[1]) - 1)}
        parts = conjuncts(substitute(mask.expr.condition, lets))
        found += [limits(part, loop.axis, ranges, set())[1] for part in parts if I.name in variables(part)]
    known = [limit for limit in found if limit is not None]
    return minimum(loop.stop, maximum(reduce(minimum, known), loop.start + 1)) if known else loop.stop
