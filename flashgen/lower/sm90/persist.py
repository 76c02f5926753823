"""The order in which blocks take tiles: one each, or, in a persistent grid, one after another."""

from __future__ import annotations

from dataclasses import replace

from flashgen.attention.parts import GROUP
from flashgen.ir.dtype import I32
from flashgen.ir.expr import Const, Expr, Var, maximum, minimum, variables
from flashgen.ir.graph import access
from flashgen.ir.nodes import Axis, Buffer, For, Kernel, Let, Scalar, Space, Stmt, Tile
from flashgen.ir.visit import Body, inline_lets, statements, substitute_stmt
from flashgen.lower.sm90.roles import in_role, needed
from flashgen.lower.sm90.stages import DONE, parity
from flashgen.machine.base import Assign, Counter, WhileLoop
from flashgen.machine.sm90 import ArriveEmpty, AskTile, PublishTile, TakeTile, WaitEmpty, WaitFull
from flashgen.plan.plan import Plan

TILE, TILES, BLOCK, BLOCKS = Var("tile"), Var("tiles"), Var("block"), Var("blocks")
Q_BLOCKS, BATCHES = Var("q_blocks"), Var("batches")
PLACE = ("q_block", "head", "batch")
NO_TILE = Const(-1)
SLOT = Tile("next_tile", DONE % 2)


def take_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """A persistent grid: a block takes one tile after another, so that loads run on while a tile ends.

    In the order of the tiles where all are equal; where some are longer (causal), the longest first, among so many
    heads at a time that their keys and values stay in the L2, each block asking for its next tile when it is ready.
    Invariant: every place of the grid (q_block, head or block of heads, batch) is taken by one block once.
    """
    if not plan.persistent:
        return kernel
    q_axis, head_axis, batch_axis = kernel.axes
    tiles = q_axis.extent * head_axis.extent * batch_axis.extent
    kernel = kernel.with_buffer(Buffer("next_tile", (), I32, Space.SHARED, stages=2))
    following: Stmt = Assign(TILE.name, TILE + BLOCKS)
    if plan.dynamic:
        kernel = kernel.with_buffer(Buffer("tile_counter", (), I32, Space.GLOBAL))
        following = AskTile(TILE.name, note="not before this one is loaded: who asks early may get more than its share")
    order = _longest_first(head_axis, plan) if q_axis.longest_first else _in_order(head_axis)
    turn = (*order, *kernel.body, following, Assign(DONE.name, DONE + 1))
    body = (
        Let(Q_BLOCKS.name, q_axis.extent),
        Let(TILES.name, Q_BLOCKS * head_axis.extent * BATCHES),
        Let(BLOCKS.name, minimum(TILES, Var("multiprocessors")), note="of this grid: as many as run at once"),
        Counter(TILE.name, BLOCK, note="the first tile of each block is that of its number"),
        Counter(DONE.name, Const(0)),
        WhileLoop(TILE < TILES, turn),
    )
    return kernel.having(
        scalars=(*kernel.scalars, Scalar("multiprocessors", I32)),
        axes=(Axis(BLOCK.name, minimum(tiles, Var("multiprocessors"))),),
        body=body,
    )


def _in_order(head_axis: Axis) -> tuple[Stmt, ...]:
    """Blocks of queries fastest: those of one head run together and share its keys and values."""
    pair, heads = TILE // Q_BLOCKS, head_axis.extent
    return Let("q_block", TILE % Q_BLOCKS), Let(head_axis.name, pair % heads), Let("batch", pair // heads)


def _longest_first(head_axis: Axis, plan: Plan) -> tuple[Stmt, ...]:
    """Some heads at a time, of each the last block of queries first; the last section may have fewer heads."""
    heads, section, within, width = head_axis.extent, Var("section"), Var("within"), Var("width")
    pairs = heads * BATCHES
    at_once, pair = Var("heads_at_once"), Var("pair")
    keys: Expr = Const(plan.keys_in_cache)
    return (
        Let(
            "heads_at_once",
            minimum(maximum(keys // maximum(Var("seqlen_k"), Const(1)), Const(1)) * (GROUP // plan.packed), pairs),
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
    kernel = in_role(kernel, "producer", lambda body: _publishing(body, PLACE + bounds))
    return in_role(kernel, "consumer", lambda body: _taking(body, bounds))


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


def _taking(body: Body, bounds: tuple[str, ...]) -> Body:
    """Without what only says where a tile lies. What the tile's end needs is taken late: it would occupy registers."""
    first_part = TakeTile(SLOT, (PLACE[0], "", "", *bounds), note="the next tile, as the producer has published it")
    take = (WaitFull(SLOT, parity(SLOT)), first_part)
    own = {TILE.name, *PLACE, *bounds}
    late = set(PLACE[1:])

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
            late_take = TakeTile(SLOT, PLACE, note="again: until here it would have occupied registers")
            turn = (*inner[:first], late_take, *end, ArriveEmpty(SLOT), *inner[done:], *take)
            result += [Counter(name, NO_TILE) for name in (*PLACE, *bounds)]
            result += [*take, WhileLoop(Var("q_block") >= 0, turn, note=stmt.note)]
        else:
            result.append(stmt)
    return tuple(result)
