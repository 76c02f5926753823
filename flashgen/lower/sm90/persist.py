"""The order in which blocks take tiles: one each, or, in a persistent grid, one after another."""

from __future__ import annotations

from dataclasses import replace

from flashgen.attention.parts import GROUP
from flashgen.attention.varlen import ARRAYS, ROW_BLOCK
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Binary, Const, Expr, Load, Var, maximum, minimum, variables, walk
from flashgen.ir.graph import access
from flashgen.ir.nodes import Axis, Buffer, For, Kernel, Let, Scalar, Space, Stmt, Tile
from flashgen.ir.visit import Body, inline_lets, rewrite, statements, substitute_stmt
from flashgen.lower.sm90.roles import in_role, needed
from flashgen.lower.sm90.stages import DONE, parity
from flashgen.machine.base import Assign, Counter, MapFragment, WhileLoop
from flashgen.machine.sm90 import (
    ArriveEmpty,
    AskTile,
    PublishTile,
    Rescore,
    Role,
    SettleNumbers,
    TakeTile,
    WaitEmpty,
    WaitFull,
    WaitWgmma,
)
from flashgen.plan.plan import Plan

TILE, TILES, BLOCK, BLOCKS = Var("tile"), Var("tiles"), Var("block"), Var("blocks")
Q_BLOCKS, BATCHES = Var("q_blocks"), Var("batches")
PLACE = ("q_block", "head", "batch")
NO_TILE = Const(-1)
NEXT = "the next tile, as the producer has published it"
TOGETHER = "the batches of a head together: they may add the same to their scores"
SLOT = Tile("next_tile", DONE % 2)


def take_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """A persistent grid: a block takes one tile after another, so that loads run on while a tile ends.

    In the order of the tiles where all are equal; where some are longer (causal), the longest first, among so many
    heads at a time that their keys and values stay in the L2, each block asking for its next tile when it is ready.
    Invariant: every place of the grid (q_block, head or block of heads, batch) is taken by one block once.
    """
    if not plan.persistent:
        return kernel
    q_axis, head_axis, *batch_axis = kernel.axes
    every_batch = Const(1) if not batch_axis else batch_axis[0].extent
    tiles = q_axis.extent * head_axis.extent * every_batch
    at_once = Var("multiprocessors") * plan.min_blocks
    kernel = kernel.with_buffer(Buffer("next_tile", (), I32, Space.SHARED, stages=2))
    following: Stmt = Assign(TILE.name, TILE + BLOCKS)
    if plan.dynamic:
        kernel = kernel.with_buffer(Buffer("tile_counter", (), I32, Space.GLOBAL))
        following = AskTile(TILE.name, note="not before this one is loaded: who asks early may get more than its share")
    together = any(item.of_any_size and not item.by_element for item in kernel.buffers)
    order = _longest_first(head_axis, plan, kernel.scalars) if q_axis.longest_first else _in_order(q_axis, head_axis)
    order = _batches_together(order, head_axis) if together else order
    turn = (*order, *kernel.body, following, Assign(DONE.name, DONE + 1))
    body = (
        Let(Q_BLOCKS.name, q_axis.extent),
        Let(TILES.name, Q_BLOCKS * head_axis.extent * (BATCHES if batch_axis else Const(1))),
        Let(BLOCKS.name, minimum(TILES, at_once), note="of this grid: as many as run at once"),
        Counter(TILE.name, BLOCK, note="the first tile of each block is that of its number"),
        Counter(DONE.name, Const(0)),
        WhileLoop(TILE < TILES, turn),
    )
    return kernel.having(
        scalars=(*kernel.scalars, Scalar("multiprocessors", I32)),
        axes=(Axis(BLOCK.name, minimum(tiles, at_once)),),
        body=body,
    )


def _in_order(q_axis: Axis, head_axis: Axis) -> tuple[Stmt, ...]:
    """Blocks of queries fastest: those of one head run together and share its keys and values.

    Packed sequences have one head after the other, each through all sequences: the kernel finds the rest.
    """
    pair, heads = TILE // Q_BLOCKS, head_axis.extent
    if q_axis.name == ROW_BLOCK.name:
        return Let(ROW_BLOCK.name, TILE % Q_BLOCKS), Let(head_axis.name, pair)
    return Let("q_block", TILE % Q_BLOCKS), Let(head_axis.name, pair % heads), Let("batch", pair // heads)


def _batches_together(order: tuple[Stmt, ...], head_axis: Axis) -> tuple[Stmt, ...]:
    """The batches of a head one after the other, not the heads of a batch.

    They then run at the same time, and read what is added to the scores of each of them from the L2.
    """
    head, batch = order[-2:]
    assert isinstance(head, Let) and isinstance(batch, Let)
    assert isinstance(head.value, Binary) and isinstance(batch.value, Binary)
    pair = head.value.x
    return (*order[:-2], Let(head_axis.name, pair // BATCHES, note=TOGETHER), Let(batch.name, pair % BATCHES))


def _longest_first(head_axis: Axis, plan: Plan, scalars: tuple[Scalar, ...]) -> tuple[Stmt, ...]:
    """Some heads at a time, of each the last block of queries first; the last section may have fewer heads."""
    heads, section, within, width = head_axis.extent, Var("section"), Var("within"), Var("width")
    pairs = heads * BATCHES
    at_once, pair = Var("heads_at_once"), Var("pair")
    keys: Expr = Const(plan.keys_in_cache)
    longest = Var("length_k" if any(item.name == "length_k" for item in scalars) else "seqlen_k")
    return (
        Let(
            "heads_at_once",
            minimum(maximum(keys // maximum(longest, Const(1)), Const(1)) * (GROUP // plan.packed), pairs),
            note=f"{'blocks of ' * (plan.packed > 1)}heads whose keys and values stay in the L2",
        ),
        Let("section", TILE // (at_once * Q_BLOCKS)),
        Let("within", TILE - section * (at_once * Q_BLOCKS)),
        Let("width", minimum(at_once, pairs - section * at_once)),
        Let("q_block", Q_BLOCKS - Const(1) - within // width, note="the longest tiles first"),
        Let("pair", section * at_once + within % width),
        Let(head_axis.name, pair % heads),
        Let("batch", pair // heads),
    )


def hand_over_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """The producer works out where the next tile lies, ahead of time, and publishes it; the computing warps take it.

    Invariant: both roles go through the same tiles, and through as many.
    """
    if not plan.persistent:
        return kernel
    every = list(statements(kernel.body))
    used = {name for loop in every if isinstance(loop, For) for name in variables(loop.start) | variables(loop.stop)}
    turns = [inner for stmt in every if isinstance(stmt, WhileLoop) for inner in stmt.body]
    lets = dict.fromkeys(stmt.name for stmt in turns if isinstance(stmt, Let))
    bounds = tuple(name for name in lets if name in used)
    found = _found(kernel, {*PLACE, *bounds})
    if 4 * len((*PLACE, *bounds, *found)) > plan.placement(SLOT.buffer).stage_bytes:
        raise ValueError(f"{kernel.name}: {PLACE + bounds + found} are more than the place of a tile has room for")
    kernel = in_role(kernel, "producer", lambda body: _publishing(body, PLACE + bounds + found))
    return in_role(kernel, "consumer", lambda body: _taking(body, bounds, found))


def _found(kernel: Kernel, known: set[str]) -> tuple[str, ...]:
    """Integers of a tile that the computing warps use, and that have been read from global memory."""
    roles = [stmt for stmt in kernel.body if isinstance(stmt, Role) and stmt.role == "consumer"]
    every = [stmt for role in roles for stmt in statements(role.body)]
    turns = [inner for stmt in every if isinstance(stmt, WhileLoop) for inner in stmt.body]
    read = dict.fromkeys(
        stmt.name
        for stmt in turns  # what a step of a loop reads is none of the tile
        if isinstance(stmt, Let) and stmt.name not in known and any(isinstance(node, Load) for node in walk(stmt.value))
    )
    used = {
        name
        for stmt in every
        if not {*known, *read} & set(stmt.assigns())
        for expr in stmt.expressions()
        for name in variables(expr)
    }
    return tuple(name for name in read if name in used)


def _publishing(body: Body, names: tuple[str, ...]) -> Body:
    result: list[Stmt] = []
    wait = WaitEmpty(SLOT, (parity(SLOT) + 1) % 2)
    for stmt in body:
        result.append(stmt)
        if isinstance(stmt, WhileLoop):
            lets = tuple(inner for inner in stmt.body if isinstance(inner, Let))
            rest = tuple(inner for inner in stmt.body if not isinstance(inner, Let))
            publish = PublishTile(SLOT, tuple(Var(name) for name in names))
            result[-1] = replace(stmt, body=(*lets, wait, publish, *rest))
            result += [wait, PublishTile(SLOT, (NO_TILE,) * len(names), note="no more")]
    return tuple(result)


def _taking(body: Body, bounds: tuple[str, ...], found: tuple[str, ...]) -> Body:
    """Without what only says where a tile lies. What the tile's end needs is taken late: it would occupy registers.

    found: what the producer has read of the tile, also taken late unless the loops use it.
    """
    looped = {name for stmt in statements(body) if isinstance(stmt, For) for name in access(stmt).reads}
    early = tuple(name if name in looped else "" for name in found)
    first_part = TakeTile(SLOT, (PLACE[0], "", "", *bounds, *_filled(early)), note=NEXT)
    take = (WaitFull(SLOT, parity(SLOT)), first_part)
    own = {TILE.name, *PLACE, *bounds, *found}
    late = {*PLACE[1:], *found} - {*early}
    behind = _filled((*("" for _ in bounds), *(name if name in late else "" for name in found)))

    def kept(body: Body) -> Body:
        return needed(tuple(stmt for stmt in body if not own & set(stmt.assigns())))

    result: list[Stmt] = []
    for stmt in kept(body):
        if isinstance(stmt, WhileLoop):
            inner = kept(stmt.body)
            first = next(at for at, stmt in enumerate(inner) if late & access(stmt).reads)
            done = max(at for at, stmt in enumerate(inner) if late & access(stmt).reads) + 1
            lets = inline_lets(inner)
            end = (substitute_stmt(stmt, lets) for stmt in inner[first:done])
            late_take = TakeTile(SLOT, (*PLACE, *behind), note="again: until here it would have occupied registers")
            turn = (*inner[:first], late_take, *end, ArriveEmpty(SLOT), *inner[done:], *take)
            result += [Counter(name, NO_TILE) for name in (*PLACE, *bounds, *found)]
            result += [*take, WhileLoop(Var("q_block") >= 0, turn, note=stmt.note)]
        else:
            result.append(stmt)
    return tuple(result)


def settle_lengths(kernel: Kernel, plan: Plan) -> Kernel:
    """What is computed of the lengths of a packed sequence stays behind the product that it is computed with.

    The compiler would move it ahead, or keep it: of the slopes of all distances 16 registers and more were spilled.
    Invariant: none; the integers keep their values.
    """
    if not any(item.name in ARRAYS for item in kernel.buffers):
        return kernel

    def change(body: Body) -> Body:
        every = list(statements(body))
        taken = {name for stmt in every if isinstance(stmt, TakeTile) for name in stmt.assigns()} - {*PLACE}
        used: dict[str, set[str]] = {}
        for stmt in every:
            if isinstance(stmt, MapFragment):
                used.setdefault(stmt.dst, set()).update(taken & variables(stmt.expr))

        def settled(stmt: Stmt) -> Stmt | Body:
            done = stmt.done if isinstance(stmt, WaitWgmma) else (stmt.dst,) if isinstance(stmt, Rescore) else ()
            found = {name for dst in done for name in used.get(dst, ())}
            return (stmt, SettleNumbers(tuple(sorted(found)))) if found else stmt

        return rewrite(body, settled)

    return in_role(kernel, "consumer", change)


def _filled(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names without those left out at the end."""
    last = max((at for at, name in enumerate(names) if name), default=-1)
    return names[: last + 1]
