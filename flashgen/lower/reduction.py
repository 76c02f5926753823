"""Row sums: lanes add up their own columns in the loop, and meet once after it."""

from __future__ import annotations

from flashgen.ir.expr import Binary, Const, Load, walk
from flashgen.ir.nodes import For, Kernel, Stmt, name_of
from flashgen.ir.visit import Body, rewrite, statements
from flashgen.machine.base import CombineLanes, FillFragment, MapFragment, ReduceRows
from flashgen.plan.plan import Plan


def combine_after_loop(kernel: Kernel, plan: Plan) -> Kernel:
    """Move CombineLanes of a sum behind the loop that accumulates it.

    Invariant: inside the loop the partial sums are only scaled and added to, and they start at zero, so the sum over
    lanes of the partial results is the result.
    """
    body: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, For):
            moved = [name for name in _sums(stmt.body) if _linear(stmt.body, name) and _starts_at_zero(body, name)]
            inner = _without(stmt.body, moved)
            body.append(For(stmt.axis, stmt.start, stmt.stop, inner, note=stmt.note))
            body += [CombineLanes(name, "sum", note="once, not in each step") for name in moved]
        else:
            body.append(stmt)
    return kernel.having(body=tuple(body))


def _sums(body: Body) -> list[str]:
    return [stmt.dst for stmt in statements(body) if isinstance(stmt, CombineLanes) and stmt.op == "sum"]


def _without(body: Body, names: list[str]) -> Body:
    """The body without the CombineLanes of some row sums."""
    return rewrite(body, lambda stmt: () if _combines(stmt, names) else stmt)


def _combines(stmt: Stmt, names: list[str]) -> bool:
    return isinstance(stmt, CombineLanes) and stmt.dst in names


def _linear(body: Body, name: str) -> bool:
    """True where the loop only does name = name * factor and name += row sum."""
    for stmt in statements(body):
        touched = name in {name_of(place) for place in (*stmt.reads(), *stmt.writes())}
        if touched and not (isinstance(stmt, CombineLanes | ReduceRows) or _scales(stmt, name)):
            return False
    return True


def _scales(stmt: Stmt, name: str) -> bool:
    if not (isinstance(stmt, MapFragment) and stmt.dst == name and isinstance(stmt.expr, Binary)):
        return False
    product = stmt.expr
    loads = [node for node in walk(product) if isinstance(node, Load) and node.buffer == name]
    return product.op == "*" and isinstance(product.x, Load) and product.x.buffer == name and len(loads) == 1


def _starts_at_zero(before: list[Stmt], name: str) -> bool:
    writes = [stmt for stmt in before if name in stmt.writes()]
    return bool(writes) and isinstance(writes[-1], FillFragment) and writes[-1].value == Const(0.0)
