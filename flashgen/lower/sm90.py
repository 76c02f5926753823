"""Passes of the sm90 family: selection, stages, roles, the overlap of softmax with matrix work, and the waits.

Roles are split on the dataflow graph of the selected statements; every wait, arrival and barrier is put in here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from flashgen.calculus import Term, affine, conjuncts
from flashgen.ir.expr import (
    NEG_INF,
    Binary,
    Compare,
    Const,
    Expr,
    J,
    Select,
    Var,
    binary,
    minimum,
    substitute,
    variables,
)
from flashgen.ir.graph import access, independent
from flashgen.ir.nodes import (
    Copy,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Level,
    Space,
    Stmt,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.visit import Body, inline_lets, rewrite_kernel, statements, substitute_stmt
from flashgen.lower.selection import select_shared
from flashgen.machine import base
from flashgen.machine.sm90 import (
    ArriveEmpty,
    ConsumerBarrier,
    InitBarriers,
    Role,
    TmaLoad,
    WaitEmpty,
    WaitFull,
    WaitWgmma,
    Wgmma,
)
from flashgen.plan.plan import Plan


def select(kernel: Kernel, plan: Plan) -> Kernel:
    """Replace TILE statements by sm90 statements; give buffers their stages and their division among the warps.

    Invariant: no TILE statement but For, If, Let and Note is left; every register buffer has a layout.
    """
    buffers = tuple(_placed(item, plan) for item in kernel.buffers)
    kernel = kernel.having(level=Level.MACHINE, buffers=buffers)
    return rewrite_kernel(kernel, lambda stmt: _select(kernel, stmt))


def _placed(buffer, plan: Plan):
    if buffer.space is Space.SHARED:
        return replace(buffer, stages=plan.stages.get(buffer.name, 1))
    if buffer.space is Space.REGISTER:
        return replace(buffer, warps=(plan.computing_warps, 1))
    return buffer


def _select(kernel: Kernel, stmt: Stmt) -> Stmt | Body:
    match stmt:
        case Copy(src=Window() as window):
            return TmaLoad(Tile(name_of(stmt.dst)), window, note=stmt.note)
        case Gemm():
            a = stmt.a if kernel.space(stmt.a) is Space.REGISTER else Tile(stmt.a)
            return Wgmma(stmt.acc, a, Tile(stmt.b), stmt.transpose_b, stmt.accumulate, note=stmt.note)
    return select_shared(kernel, stmt)


def isolate_columns(kernel: Kernel, plan: Plan) -> Kernel:
    """In masks, bring the limits of a column together as one for each row, with which a constant is compared.

    Two comparisons an element are two branches to the compiler, which then has no registers left for the pipeline.
    Invariant: the mask holds for the same elements as before.
    """

    def change(stmt: Stmt) -> Stmt:
        if isinstance(stmt, base.MapFragment) and isinstance(stmt.expr, Select) and stmt.expr.y == NEG_INF:
            return replace(stmt, expr=replace(stmt.expr, condition=_isolated(stmt.expr.condition)))
        return stmt

    return rewrite_kernel(kernel, change)


def _isolated(condition: Expr) -> Expr:
    """j < min(limits), and what does not limit a column from above."""
    limits: list[Expr] = []
    others: list[Expr] = []
    for compare in conjuncts(condition):
        terms, rest = affine(compare.x, {J.name}) if J.name not in variables(compare.y) else ({}, compare.x)
        if terms.get(J.name) == Term(1, Const(1)) and compare.op in ("<", "<="):
            limit = binary("-", compare.y, rest)
            limits.append(limit + 1 if compare.op == "<=" else limit)
        else:
            others.append(compare)
    first = [Compare("<", J, reduce(minimum, limits))] if limits else []
    return reduce(lambda x, y: x & y, [*first, *others])


def stage_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """Tiles that a loop loads go round through their stages: step n of the loop uses stage n % stages.

    Invariant: every access to such a tile names its stage by the step that loaded it.
    """
    body = tuple(_staged_loop(stmt, plan) if isinstance(stmt, For) else stmt for stmt in kernel.body)
    return kernel.having(body=body)


def _staged_loop(loop: For, plan: Plan) -> For:
    loaded = {name_of(stmt.dst) for stmt in loop.body if isinstance(stmt, TmaLoad)}
    step = binary("-", Var(loop.axis), loop.start)

    def at_stage(stmt: Stmt) -> Stmt:
        places = {name: getattr(stmt, name) for name in vars(stmt) if isinstance(getattr(stmt, name), Tile)}
        changes = {
            name: Tile(tile.buffer, step % plan.stages[tile.buffer])
            for name, tile in places.items()
            if tile.buffer in loaded
        }
        return replace(stmt, **changes) if changes else stmt  # type: ignore[arg-type]

    return replace(loop, body=tuple(at_stage(stmt) for stmt in loop.body))


def split_roles(kernel: Kernel, plan: Plan) -> Kernel:
    """One thread loads, the computing warps do everything else.

    Invariant: a load depends on no statement of the other role (the dataflow graph has no edge into it but from Lets).
    """
    shared = tuple(stmt for stmt in kernel.body if isinstance(stmt, Let))
    rest = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Let))
    producer = _only(rest, loads=True)
    consumer = _only(rest, loads=False)
    written = {name_of(place) for stmt in statements(consumer) for place in stmt.writes()}
    read = {name_of(place) for stmt in statements(producer) for place in stmt.reads()}
    if written & read:
        raise ValueError(f"{kernel.name}: loads depend on {sorted(written & read)}, which the computing warps write")
    roles = (
        Role("producer", plan.role_registers[0], producer, note="one thread keeps the stages full"),
        Role("consumer", plan.role_registers[1], consumer),
    )
    return kernel.having(body=(InitBarriers(), *shared, *roles))


def _only(body: Body, loads: bool) -> Body:
    """The statements of one role, with the loops around them and the Lets that they need."""
    result: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, For):
            inner = _needed(_only(stmt.body, loads))
            if any(not isinstance(part, Let) for part in inner):
                result.append(replace(stmt, body=inner))
        elif isinstance(stmt, Let) or isinstance(stmt, TmaLoad) is loads:
            result.append(stmt)
    return tuple(result)


def _needed(body: Body) -> Body:
    """The body without Lets that nothing in it uses."""
    result: list[Stmt] = []
    used: set[str] = set()
    for stmt in reversed(body):
        if isinstance(stmt, Let) and stmt.name not in used:
            continue
        for inner in statements((stmt,)):
            for expr in inner.expressions():
                used |= variables(expr)
        result.append(stmt)
    return tuple(reversed(result))


def overlap(kernel: Kernel, plan: Plan) -> Kernel:
    """Issue the next scores before the last product of a step: softmax then runs while the matrix units work.

    Step n of the loop multiplies P of step n - 1 by V behind the scores of step n; the first step has no such product
    and stands before the loop, the last one's stands behind it.
    Invariant: the two products are independent in the dataflow graph.
    """
    return _in_role(kernel, "consumer", _overlap)


def _in_role(kernel: Kernel, role: str, change) -> Kernel:
    body = tuple(
        replace(stmt, body=change(kernel, stmt.body)) if isinstance(stmt, Role) and stmt.role == role else stmt
        for stmt in kernel.body
    )
    return kernel.having(body=body)


def _overlap(kernel: Kernel, body: Body) -> Body:
    result: list[Stmt] = []
    for stmt in body:
        result += _rotated(kernel, stmt) if isinstance(stmt, For) else [stmt]
    return tuple(result)


def _rotated(kernel: Kernel, loop: For) -> list[Stmt]:
    lets = tuple(stmt for stmt in loop.body if isinstance(stmt, Let))
    work = tuple(stmt for stmt in loop.body if not isinstance(stmt, Let))
    first, *middle, last = work
    if not (isinstance(first, Wgmma) and isinstance(last, Wgmma) and independent((first, last), 0, 1)):
        return [loop]
    values = inline_lets(loop.body)

    def at(stmt: Stmt, step: Expr) -> Stmt:
        inlined = {name: substitute(value, {loop.axis: step}) for name, value in values.items()}
        return substitute_stmt(stmt, inlined | {loop.axis: step})

    some = loop.start < loop.stop
    before = tuple(at(stmt, loop.start) for stmt in (first, *middle))
    behind = at(last, binary("-", Var(loop.axis), Const(1)))
    final = at(last, binary("-", loop.stop, Const(1)))
    return [
        If(some, before, note="the first step has no product to overlap with"),
        replace(loop, start=binary("+", loop.start, Const(1)), body=(*lets, first, behind, *middle)),
        If(some, (final,), note="the product of the last step"),
    ]


def guard_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """Wait for a stage to be empty before it is loaded, and for it to be full before it is first read.

    Invariant: each wait names the parity of the phase that belongs to its step.
    """

    def producer(kernel: Kernel, body: Body) -> Body:
        result: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, For):
                stmt = replace(stmt, body=producer(kernel, stmt.body))
            elif isinstance(stmt, TmaLoad) and _goes_round(kernel, stmt.dst):
                parity = (_round(stmt.dst) + 1) % 2
                result.append(WaitEmpty(stmt.dst, parity))
            result.append(stmt)
        return tuple(result)

    def consumer(kernel: Kernel, body: Body) -> Body:
        result: list[Stmt] = []
        seen: set[Tile] = set()
        for stmt in body:
            if isinstance(stmt, For | If):
                stmt = replace(stmt, body=consumer(kernel, stmt.body))
            elif isinstance(stmt, Wgmma):
                tiles = [place for place in stmt.reads() if isinstance(place, Tile) and _goes_round(kernel, place)]
                result += [WaitFull(tile, _round(tile) % 2) for tile in tiles if tile not in seen]
                seen |= set(tiles)
            result.append(stmt)
        return tuple(result)

    kernel = _in_role(_in_role(kernel, "producer", producer), "consumer", consumer)
    return _in_role(kernel, "consumer", lambda kernel, body: (*_first_waits(kernel, body), *body))


def _first_waits(kernel: Kernel, body: Body) -> list[Stmt]:
    """Waits for tiles that are loaded once."""
    tiles = [place for stmt in statements(body) if isinstance(stmt, Wgmma) for place in stmt.reads()]
    once = [tile for tile in dict.fromkeys(tiles) if isinstance(tile, Tile) and not _goes_round(kernel, tile)]
    return [WaitFull(tile, Const(0)) for tile in once]


def _goes_round(kernel: Kernel, tile: Tile) -> bool:
    return kernel.buffer(tile.buffer).stages > 1


def _round(tile: Tile) -> Expr:
    """How often the ring of stages has been passed at the step that a stage belongs to; the first step's is zero."""
    stage = tile.stage
    return stage.x // stage.y if isinstance(stage, Binary) else Const(0)


def wait_products(kernel: Kernel, plan: Plan) -> Kernel:
    """Wait for a product before its accumulator is used or its register operand is overwritten; then release its tiles.

    Invariant: no statement touches what a product in flight reads from registers or writes.
    """
    return _in_role(kernel, "consumer", lambda kernel, body: _waited(kernel, body))


def _waited(kernel: Kernel, body: Body) -> Body:
    result: list[Stmt] = []
    flying: list[Wgmma] = []

    def finish(count: int) -> None:
        if not count:
            return
        done = flying[:count]
        del flying[:count]
        result.append(WaitWgmma(len(flying), tuple(dict.fromkeys(stmt.acc for stmt in done))))
        tiles = [
            place for stmt in done for place in stmt.reads() if isinstance(place, Tile) and _goes_round(kernel, place)
        ]
        result.extend(ArriveEmpty(tile) for tile in tiles)

    for stmt in body:
        if isinstance(stmt, For | If):
            finish(len(flying) if isinstance(stmt, For) else _conflicts(stmt, flying))
            stmt = replace(stmt, body=_waited(kernel, stmt.body))
        elif isinstance(stmt, Wgmma):
            finish(0 if stmt.accumulate else _conflicts(stmt, flying))
            flying.append(stmt)
        else:
            finish(_conflicts(stmt, flying))
        result.append(stmt)
    finish(len(flying))
    return tuple(result)


def _conflicts(stmt: Stmt, flying: list[Wgmma]) -> int:
    """How many of the products in flight have to be done before a statement."""
    touched = access(stmt)
    count = 0
    for position, product in enumerate(flying):
        operand = {product.a} if isinstance(product.a, str) else set()
        if product.acc in touched.reads | touched.writes or operand & touched.writes:
            count = position + 1
    return count


def meet_consumers(kernel: Kernel, plan: Plan) -> Kernel:
    """Barriers among the computing warps around what they exchange through shared memory.

    Invariant: a tile stored by the warps is read behind a barrier, and stored behind one where it lies over others.
    """

    def change(kernel: Kernel, body: Body) -> Body:
        result: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, base.StoreFragment) and _lies_over_others(plan, stmt.dst.buffer):
                result.append(ConsumerBarrier(note="every warp is done with the tiles that this one lies over"))
            if isinstance(stmt, base.StoreTile):
                result.append(ConsumerBarrier())
            result.append(stmt)
        return tuple(result)

    return _in_role(kernel, "consumer", change)


def _lies_over_others(plan: Plan, name: str) -> bool:
    mine = plan.placement(name)
    return any(p.buffer != name and p.offset < mine.end and mine.offset < p.end for p in plan.shared)
