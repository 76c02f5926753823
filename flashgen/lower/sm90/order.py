"""The order of the products within a step, and the vectors that land with a tile."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.graph import access, independent
from flashgen.ir.nodes import For, Kernel, Let, Stmt
from flashgen.ir.visit import Body, rewrite, rewrite_kernel
from flashgen.lower.sm90.roles import in_role
from flashgen.machine.base import MapFragment, PackFragment, StoreFragment
from flashgen.machine.sm90 import LoadVector, ReduceFragment, TmaLoad, Wgmma
from flashgen.plan.plan import Plan


def join_vectors(kernel: Kernel, plan: Plan) -> Kernel:
    """A vector lands with the tile that is loaded before it: one wait for both.

    Invariant: whoever has waited for the tile may read the vector, and the tile is released behind the last such read.
    """

    def change(stmt: Stmt) -> Stmt:
        return replace(stmt, body=_joined(stmt.body)) if isinstance(stmt, For) else stmt

    return rewrite_kernel(kernel, change)


def _joined(body: Body) -> Body:
    result: list[Stmt] = []
    at: int | None = None
    for stmt in body:
        if isinstance(stmt, LoadVector):
            if at is None:
                raise ValueError(f"{stmt.dst.buffer} is loaded before any tile that it could land with")
            tile = result[at]
            assert isinstance(tile, TmaLoad)
            result[at] = replace(tile, beside=(*tile.beside, stmt.dst.buffer))
            stmt = replace(stmt, tile=tile.dst)
        elif isinstance(stmt, TmaLoad):
            at = len(result)
        result.append(stmt)
    return tuple(result)


def order_products(kernel: Kernel, plan: Plan) -> Kernel:
    """Issue products that a step waits for as early as their operands allow, the others where they hold nobody up.

    The scores and the gradient of P are issued one behind the other. What only adds to an accumulator is issued before
    the warps meet, or behind the product that is waited for next: it runs meanwhile.
    Invariant: statements change places only where the dataflow graph has no edge between them.
    """
    return in_role(kernel, "consumer", lambda body: rewrite(body, lambda stmt: _ordered(stmt, plan)))


def _ordered(loop: Stmt, plan: Plan) -> Stmt:
    if not isinstance(loop, For):
        return loop
    body = list(loop.body)
    for product in [stmt for stmt in body if isinstance(stmt, Wgmma) and not stmt.accumulate]:
        _move(
            body, product, -1, lambda stmt: isinstance(stmt, Let) or (isinstance(stmt, Wgmma) and not stmt.accumulate)
        )
    for product in [stmt for stmt in body if isinstance(stmt, Wgmma) and stmt.accumulate]:
        late = plan.has("late")
        _move(body, product, 1, lambda stmt, late=late: isinstance(stmt, ReduceFragment) or _stops(stmt, late, body))
        for pack in [stmt for stmt in body if late and isinstance(stmt, PackFragment) and stmt.dst == product.a]:
            _move(body, pack, 1, lambda stmt: isinstance(stmt, PackFragment | StoreFragment))
    return replace(loop, body=tuple(body))


def _stops(stmt: Stmt, late: bool, body: list[Stmt]) -> bool:
    """With "late" the next product; else what waits for a product in flight, or where the warps meet."""
    if late:
        return isinstance(stmt, Wgmma)
    if isinstance(stmt, StoreFragment):
        return True
    waited = {product.acc for product in body if isinstance(product, Wgmma) and not product.accumulate}
    return isinstance(stmt, MapFragment) and bool(access(stmt).reads & waited)


def _move(body: list[Stmt], stmt: Stmt, by: int, stop) -> None:
    """Move a statement up or down past all that it does not depend on, until `stop` or the end."""
    at = next(position for position, other in enumerate(body) if other is stmt)
    while 0 <= at + by < len(body):
        other = body[at + by]
        pair = (other, stmt) if by < 0 else (stmt, other)
        if stop(other) or not independent(pair, 0, 1):
            return
        body[at], body[at + by] = other, stmt
        at += by
