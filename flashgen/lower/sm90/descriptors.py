"""Descriptors: where the operands of products begin."""

from __future__ import annotations

from flashgen.ir.nodes import For, If, Kernel, Stmt, Tile
from flashgen.ir.visit import Body, statements
from flashgen.lower.sm90.roles import behind_lets, for_each_tile, in_role, within
from flashgen.machine.sm90 import OWN_ROWS, Describe, Wgmma
from flashgen.machine.sm90_facts import operands
from flashgen.plan.plan import Plan


def describe(kernel: Kernel, plan: Plan) -> Kernel:
    """Compute the descriptors of a body's operands at its beginning, before the waits for them: it takes a while.

    Those of Q once for a tile of queries, or once and for all where it has one stage.
    Invariant: every product has the descriptors of its tiles in its own body or around it.
    """

    def of(stmt: Stmt) -> tuple[Describe, ...]:
        return operands(kernel, stmt) if isinstance(stmt, Wgmma) else ()

    def moving(body: Body) -> list[Describe]:
        """Of tiles with several stages."""
        every = dict.fromkeys(item for stmt in body for item in of(stmt))
        return [item for item in every if kernel.buffer(item.tile.buffer).stages > 1]

    def for_a_step(body: Body) -> Body:
        own = tuple(item for item in moving(body) if item.part != OWN_ROWS)
        return behind_lets(within(body, for_a_step, (For, If)), own)

    def for_a_tile(body: Body) -> Body:
        queries = tuple(item for item in moving(tuple(statements(body))) if item.part == OWN_ROWS)
        return behind_lets(for_a_step(body), queries)

    def outer(body: Body) -> Body:
        every = dict.fromkeys(item for stmt in statements(body) for item in of(stmt))
        fixed = tuple(item for item in every if kernel.buffer(item.tile.buffer).stages == 1)
        once = dict.fromkeys(Describe(Tile(item.tile.buffer), item.part) for item in fixed)
        return (*once, *for_each_tile(body, for_a_tile))

    return in_role(kernel, "consumer", outer)
