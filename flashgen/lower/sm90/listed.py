"""Lists of blocks: what the computing warps read of them, and the masks of blocks that are listed as partial."""

from __future__ import annotations

from flashgen.ir.expr import Expr, I, J, Load, loads, variables, walk
from flashgen.ir.nodes import If, Kernel, Let, Stmt
from flashgen.ir.visit import Body, rewrite, statements
from flashgen.lower.sm90.roles import in_role
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import Broadcast, MapColumns
from flashgen.plan.plan import Plan

# Columns for which a mask asks at a time. By NVRTC 13.5, head_dim 64: asking for all of a row at once, behind a branch,
# spills up to 176 bytes of the backward; where elements differ by row and column, so does asking for four. The forward,
# which evaluates a mask once more where its guess fails, spills up to 20 bytes with columns, and without them none.
COLUMNS, COLUMNS_OF_ELEMENTS = 4, 1


def read_lists(kernel: Kernel, plan: Plan) -> Kernel:
    """An entry of a list is the same in all lanes, and is said to be: with what follows from it, it then needs none of
    their registers. In the backward a mask that depends on an entry loads its elements for few columns at a time.

    Invariant: none; the same values in another order.
    """
    backward = not plan.has("guessed maximum")
    entries = {stmt.name for stmt in statements(kernel.body) if isinstance(stmt, Let) and loads(stmt.value)}

    def change(stmt: Stmt) -> Stmt | Body:
        if isinstance(stmt, Let) and stmt.name in entries:
            return Broadcast(stmt.name, stmt.value, note=stmt.note)
        if backward and isinstance(stmt, If) and entries & variables(stmt.condition):
            return If(stmt.condition, tuple(_by_columns(kernel, inner) for inner in stmt.body), note=stmt.note)
        return stmt

    return in_role(kernel, "consumer", lambda body: rewrite(body, change)) if entries else kernel


def _by_columns(kernel: Kernel, stmt: Stmt) -> Stmt:
    differ = _loaded(kernel, stmt.expr) if isinstance(stmt, MapFragment) else []
    if not isinstance(stmt, MapFragment) or not any(J.name in names for names in differ):
        return stmt
    columns = COLUMNS_OF_ELEMENTS if {I.name, J.name} in differ else COLUMNS
    return MapColumns(stmt.dst, stmt.expr, columns, note=stmt.note)


def _loaded(kernel: Kernel, expr: Expr) -> list[set[str]]:
    """By what each number differs that is loaded from memory: by rows i, by columns j or both."""
    found = (node for node in walk(expr) if isinstance(node, Load) and kernel.buffer(node.buffer).by_element)
    return [variables(node) & {I.name, J.name} for node in found]
