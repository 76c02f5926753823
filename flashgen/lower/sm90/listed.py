"""Lists of blocks: what the computing warps read of them, and the masks of blocks that are listed as partial."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Expr, I, J, Load, Var, loads, substitute, variables, walk
from flashgen.ir.nodes import For, If, Kernel, Let, Stmt
from flashgen.ir.visit import Body, rewrite, statements
from flashgen.lower.sm90.overlap import FIRST
from flashgen.lower.sm90.persist import NO_TILE, PLACE
from flashgen.lower.sm90.roles import behind_lets, for_each_tile, in_role
from flashgen.machine.base import Assign, Counter, MapFragment, WhileLoop
from flashgen.machine.sm90 import Broadcast, MapColumns, PublishTile, TakeTile, WaitWgmma
from flashgen.plan.plan import Plan

# Columns for which a mask asks at a time. By NVRTC 13.5, head_dim 64: asking for all of a row at once, behind a branch,
# spills up to 176 bytes of the backward; where elements differ by row and column, so does asking for four. The forward,
# which evaluates a mask once more where its guess fails, spills up to 20 bytes with columns, and without them none.
COLUMNS, COLUMNS_OF_ELEMENTS = 4, 1


def read_lists(kernel: Kernel, plan: Plan) -> Kernel:
    """An entry of a list is the same in all lanes, and is said to be: with what follows from it, it then needs none of
    their registers. In the backward a mask that depends on an entry loads its elements for few columns at a time. In
    the forward an entry is read a step ahead, as a step begins with it.

    Invariant: none; the same values in another order.
    """
    backward = kernel.name != "attention_forward"
    entries = {stmt.name for stmt in statements(kernel.body) if isinstance(stmt, Let) and loads(stmt.value)}

    def change(stmt: Stmt) -> Stmt | Body:
        if isinstance(stmt, Let) and stmt.name in entries:
            return Broadcast(stmt.name, stmt.value, note=stmt.note)
        if backward and isinstance(stmt, If) and entries & variables(stmt.condition):
            return If(stmt.condition, tuple(_by_columns(kernel, inner) for inner in stmt.body), note=stmt.note)
        return stmt

    if not entries:
        return kernel
    kernel = in_role(kernel, "consumer", lambda body: rewrite(body, change))
    return (
        kernel if backward else _first_published(in_role(kernel, "consumer", lambda body: for_each_tile(body, _ahead)))
    )


def _ahead(body: Body) -> Body:
    """What is done for a tile of queries, with entries read a step ahead; behind the last one, in vain."""
    result: list[Stmt] = []
    for stmt in body:
        entry = next((inner for inner in getattr(stmt, "body", ()) if isinstance(inner, Broadcast)), None)
        if isinstance(stmt, For) and entry is not None:
            ahead = Var(f"{entry.name}_ahead")
            first, following = (substitute(entry.value, {stmt.axis: at}) for at in (stmt.start, Var(stmt.axis) + 1))
            taken = max((at for at, before in enumerate(result) if isinstance(before, TakeTile)), default=-1) + 1
            result.insert(taken or len(result), Counter(ahead.name, first, note="read a step ahead"))
            steps = [replace(inner, value=ahead) if inner is entry else inner for inner in stmt.body]
            wait = next(at for at, inner in enumerate(steps) if isinstance(inner, WaitWgmma))
            steps.insert(wait, Assign(ahead.name, following))
            stmt = replace(stmt, body=tuple(steps))
        result.append(stmt)
    return tuple(result)


def _first_published(kernel: Kernel) -> Kernel:
    """The entry of a tile's first step comes with the tile, from the producer: it is what everything else waits for."""
    every = list(statements(kernel.body))
    slots = [stmt for stmt in every if isinstance(stmt, PublishTile)]
    entries = [stmt for stmt in every if isinstance(stmt, Broadcast) and stmt.name.startswith(f"{FIRST}_")]
    if not slots or len(entries) != 1 or variables(entries[0].value) - {*PLACE}:
        return kernel
    (entry,), place = entries, len(slots[0].values)

    def publish(stmt: Stmt) -> Stmt:
        if isinstance(stmt, WhileLoop):
            return replace(stmt, body=behind_lets(stmt.body, (Let(entry.name, entry.value),)))
        if isinstance(stmt, PublishTile):
            more = NO_TILE if stmt.values[0] == NO_TILE else Var(entry.name)
            return replace(stmt, values=(*stmt.values, more))
        return stmt

    def take(body: Body) -> Body:
        body = rewrite(body, lambda stmt: () if stmt == entry else stmt)
        last = max(at for at, stmt in enumerate(body[:-1]) if isinstance(stmt, TakeTile) and {*PLACE} <= {*stmt.names})
        slot = body[last]
        assert isinstance(slot, TakeTile)
        names = (*slot.names, *("" for _ in range(place - len(slot.names))), entry.name)
        return (*body[:last], replace(slot, names=names), *body[last + 1 :])

    kernel = in_role(kernel, "producer", lambda body: rewrite(body, publish))
    first = Counter(entry.name, NO_TILE)
    return in_role(kernel, "consumer", lambda body: (first, *for_each_tile(body, take)))


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
