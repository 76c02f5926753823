"""Descriptors: where the operands of products begin."""

from __future__ import annotations

from flashgen.ir.nodes import For, If, Kernel, Let, Stmt, Tile
from flashgen.ir.visit import Body, statements
from flashgen.lower.sm90.roles import in_role, within
from flashgen.machine.base import WhileLoop
from flashgen.machine.sm90 import Describe, Wgmma
from flashgen.plan.plan import Plan


def describe(kernel: Kernel, plan: Plan) -> Kernel:
    """Compute the descriptors of a body's operands at its beginning, before the waits for them: it takes a while.

    Invariant: every product has the descriptors of its tiles in its own body or around it.
    """

    def fixed(stmt: Describe) -> bool:
        return kernel.buffer(stmt.tile.buffer).stages == 1

    def change(body: Body) -> Body:
        own = dict.fromkeys(item for stmt in body for item in _operands(stmt) if not fixed(item))
        changed = within(body, change, (For, If, WhileLoop))
        lets = next((at for at, stmt in enumerate(changed) if not isinstance(stmt, Let)), len(changed))
        return (*changed[:lets], *own, *changed[lets:])

    def outer(body: Body) -> Body:
        """Tiles of one stage are described once."""
        every = [item for stmt in statements(body) for item in _operands(stmt) if fixed(item)]
        return (*dict.fromkeys(Describe(Tile(item.tile.buffer), item.order) for item in every), *change(body))

    return in_role(kernel, "consumer", outer)


def _operands(stmt: Stmt) -> list[Describe]:
    if not isinstance(stmt, Wgmma):
        return []
    rows = [Describe(stmt.a, "own rows")] if isinstance(stmt.a, Tile) else []
    return [*rows, Describe(stmt.b, "rows" if stmt.transpose_b else "columns")]
