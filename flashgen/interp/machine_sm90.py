"""The meaning of the statements of machine/sm90.py for one warp; that of mbarriers and loads is in mbarriers.py.

A product's operands are read when it is issued; its result appears at its wait, and until then the accumulator does not
exist and a register operand may not be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flashgen.interp import mbarriers
from flashgen.interp.fragments import columns_of, get, hazard, rows_of
from flashgen.interp.machine_base import RUN as BASE
from flashgen.interp.sm90_state import state
from flashgen.interp.warps import Block, Meaning, Steps, Waiting, Warp
from flashgen.ir.graph import access
from flashgen.ir.nodes import Stmt, Tile, name_of
from flashgen.machine import sm90
from flashgen.machine.base import AddFragment, Counter, MapFragment, StoreFragment, StoreTransposed
from flashgen.machine.sm90 import WARPGROUP_ROWS


def _init_barriers(block: Block, warp: Warp, stmt: sm90.InitBarriers) -> Steps:
    yield from block.meet(warp, stmt)


def _role(block: Block, warp: Warp, stmt: sm90.Role) -> Steps:
    """The producer is one thread: here the first warp behind the computing ones."""
    computing = warp.index < block.plan.computing_warps
    mine = stmt.warpgroup is None or stmt.warpgroup == _warpgroup(warp)
    if mine and computing == (stmt.role == "consumer") and warp.index <= block.plan.computing_warps:
        yield from block.steps(warp, stmt.body)


def _reduce_fragment(block: Block, warp: Warp, stmt: sm90.ReduceFragment) -> None:
    """The meaning of AddFragment; the warp's part of the shared tile is its own, so no barrier stands in between."""
    block.shared.left(warp.index)
    value = get(warp, stmt, stmt.src)
    rows, columns = rows_of(block, warp, stmt.src)[:, None], columns_of(block, warp, stmt.src)
    access_ = block.access(warp, stmt, stmt.through)
    block.shared.write(access_, value, rows, columns)
    block.shared.fence(warp.index)
    block.shared.hand_over(access_)
    block.shared.leave(access_, rows, columns)
    block.trace.shared(block.plan.arch, 2 * block.shared.nbytes(stmt.through.buffer, value.size))
    BASE[AddFragment](block, warp, stmt)


def _wgmma(block: Block, warp: Warp, stmt: sm90.Wgmma) -> None:
    rows, columns = rows_of(block, warp, stmt.acc), columns_of(block, warp, stmt.acc)
    b = _operand(block, warp, stmt, stmt.b, columns, stmt.transpose_b)
    if isinstance(stmt.a, Tile):
        a = _operand(block, warp, stmt, stmt.a, rows, not stmt.transpose_a).T
    else:
        a = get(warp, stmt, name_of(stmt.a))
    product = np.matmul(a, b)
    if stmt.accumulate:
        product += get(warp, stmt, stmt.acc)
    warp.registers.pop(stmt.acc, None)
    state(block).products[warp.index].append((stmt, product))
    block.trace.matrix(block.plan.arch, len(rows) * len(columns) * a.shape[1])


def _operand(block: Block, warp: Warp, stmt: Stmt, tile: Tile, part: np.ndarray, by_row: bool) -> np.ndarray:
    """[depth, part]: rows of a tile transposed (a, and b kept as [n][k]), or its columns."""
    phases = mbarriers.phases_of(block, warp, tile)
    if phases.full and warp.index not in phases.seen:
        raise hazard(warp, stmt, f"{tile.buffer} is read without a wait for its load")
    height, width = block.shape(tile.buffer)
    index = (part[:, None], np.arange(width)) if by_row else (np.arange(height)[:, None], part)
    value = block.shared.read_by_proxy(block.access(warp, stmt, tile), *index)
    return value.T if by_row else value


def _store_fragment(block: Block, warp: Warp, stmt: StoreFragment) -> None:
    """Refused where a product of any warp may still read what is overwritten."""
    place = block.plan.placement(stmt.dst.buffer)
    first = place.offset + warp.uniform(stmt.dst.stage) * place.stage_bytes
    for other, products in state(block).products.items():
        for product, _ in products:
            for tile in (item for item in product.reads() if isinstance(item, Tile)):
                read = block.plan.placement(tile.buffer)
                start = read.offset + block.warps[other].uniform(tile.stage) * read.stage_bytes
                if start < first + place.stage_bytes and first < start + read.stage_bytes:
                    raise hazard(warp, stmt, f"{tile.buffer} is overwritten while a product of warp {other} reads it")
    BASE[StoreFragment](block, warp, stmt)


def _wait_wgmma(block: Block, warp: Warp, stmt: sm90.WaitWgmma) -> None:
    flying = state(block).products[warp.index]
    done = {}
    while len(flying) > stmt.pending:
        product, value = flying.pop(0)
        done[product.acc] = value
    if set(stmt.done) != set(done):
        raise hazard(warp, stmt, f"finishes {sorted(done)}, not {sorted(stmt.done)}")
    warp.registers |= done


def _meet(block: Block, name: str, count: int) -> Iterator[Waiting]:
    """Waits at a named barrier until `count` warps have come."""
    meeting = state(block).meetings[name]
    before = meeting.complete
    if not meeting.arrive(count):
        yield Waiting(lambda: meeting.complete > before)


def _consumer_barrier(block: Block, warp: Warp, stmt: sm90.ConsumerBarrier) -> Steps:
    epoch = block.shared.epoch
    yield from _meet(block, "consumers", block.plan.computing_warps)
    if block.shared.epoch == epoch:
        block.shared.barrier()


def _warpgroup_barrier(block: Block, warp: Warp, stmt: sm90.WarpgroupBarrier) -> Steps:
    group = _warpgroup(warp)
    yield from _meet(block, f"warpgroup {group}", 4)
    block.shared.meet(range(4 * group, 4 * group + 4))


def _warpgroup(warp: Warp) -> int:
    return warp.index // 4


def _first_turn(block: Block, warp: Warp, stmt: sm90.FirstTurn) -> None:
    if _warpgroup(warp) == block.plan.computing_warps // 4 - 1:
        _pass_turn(block, warp, stmt)


def _wait_turn(block: Block, warp: Warp, stmt: sm90.WaitTurn) -> Steps:
    yield from _meet(block, f"turn {_warpgroup(warp)}", 8)


def _pass_turn(block: Block, warp: Warp, stmt: sm90.FirstTurn | sm90.PassTurn) -> None:
    following = (_warpgroup(warp) + 1) % (block.plan.computing_warps // 4)
    state(block).meetings[f"turn {following}"].arrive(8)


def _settle_numbers(block: Block, warp: Warp, stmt: sm90.SettleNumbers) -> None:
    """For the compiler: nothing to do."""


def _describe(block: Block, warp: Warp, stmt: sm90.Describe) -> None:
    """An address: nothing to do."""


def _if_any_large(block: Block, warp: Warp, stmt: sm90.IfAnyLarge) -> Steps:
    if not (get(warp, stmt, stmt.src) < 2).all():
        yield from block.steps(warp, stmt.body)


def _rescore(block: Block, warp: Warp, stmt: sm90.Rescore) -> None:
    rows, columns = rows_of(block, warp, stmt.dst), columns_of(block, warp, stmt.dst)
    a = _operand(block, warp, stmt, stmt.a, rows, True)
    warp.registers[stmt.dst] = np.matmul(a.T, _operand(block, warp, stmt, stmt.b, columns, True))
    for tile in (stmt.a, stmt.b):
        mbarriers.phases_of(block, warp, tile).unfenced.add(warp.index)


def _load_matrix(block: Block, warp: Warp, stmt: sm90.LoadMatrix) -> None:
    if warp.index not in mbarriers.phases_of(block, warp, stmt.src).seen:
        raise hazard(warp, stmt, f"{stmt.src.buffer} is read without a wait for its load")
    rows, columns = rows_of(block, warp, stmt.dst)[:, None], columns_of(block, warp, stmt.dst)
    place = (columns, rows) if stmt.transposed else (rows, columns)
    warp.registers[stmt.dst] = block.shared.read(block.access(warp, stmt, stmt.src), *place)
    mbarriers.phases_of(block, warp, stmt.src).unfenced.add(warp.index)
    block.trace.shared(block.plan.arch, block.shared.nbytes(stmt.src.buffer, rows.size * columns.size))


def _fence_stores(block: Block, warp: Warp, stmt: sm90.FenceStores) -> None:
    block.shared.fence(warp.index)


def _fence_reads(block: Block, warp: Warp, stmt: sm90.FenceReads) -> None:
    for phases in state(block).phases.values():
        phases.unfenced.discard(warp.index)


def _tma_store(block: Block, warp: Warp, stmt: sm90.TmaStore) -> None:
    """One thread copies the rows of its warpgroup: here that of the first warp."""
    if warp.index % 4:
        return
    name = stmt.src.buffer
    first = WARPGROUP_ROWS * _warpgroup(warp) % block.shape(name)[0]  # 0 where a warpgroup has a tile to itself
    rows = first + np.arange(WARPGROUP_ROWS)[:, None]
    width, part = block.shape(name)[1] // (stmt.across or 1), _warpgroup(warp) % (stmt.across or 1)
    columns = part * width + np.arange(width)
    value = block.shared.leave(block.access(warp, stmt, stmt.src), rows, columns)
    block.store(warp, stmt.dst, block.shape(name), value, rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(name, value.size))


def _wait_stored(block: Block, warp: Warp, stmt: sm90.WaitStored) -> None:
    block.shared.left(warp.index)


def _ask_tile(block: Block, warp: Warp, stmt: sm90.AskTile) -> None:
    tiles, blocks = int(warp.names["tiles"]), int(warp.names["blocks"])
    asked = block.trace.statements["AskTile"]  # by all blocks, with this question
    warp.names[stmt.name] = blocks + asked - 1
    if asked > tiles:
        raise hazard(warp, stmt, "more questions than tiles: the counter would not go back to zero")


def _guarded(meaning: Meaning) -> Meaning:
    """A statement on registers, refused where a product in flight still writes or reads them."""

    def run(block: Block, warp: Warp, stmt: Stmt) -> Any:
        touched = access(stmt)
        for product, _ in state(block).products[warp.index]:
            if product.acc in touched.reads | touched.writes:
                raise hazard(warp, stmt, f"{product.acc} is used while a product that writes it is in flight")
            if isinstance(product.a, str) and product.a in touched.writes:
                raise hazard(warp, stmt, f"{product.a} is overwritten while a product that reads it is in flight")
        return meaning(block, warp, stmt)

    return run


RUN: dict[type, Meaning] = {kind: _guarded(meaning) for kind, meaning in BASE.items()} | {
    sm90.InitBarriers: _init_barriers,
    sm90.Role: _role,
    StoreFragment: _guarded(_store_fragment),
    StoreTransposed: _guarded(_store_fragment),
    sm90.TmaLoad: mbarriers.tma_load,
    sm90.LoadVector: mbarriers.load_vector,
    sm90.WaitFull: mbarriers.wait_full,
    sm90.WaitEmpty: mbarriers.wait_empty,
    sm90.ArriveEmpty: mbarriers.arrive_empty,
    sm90.PassOver: mbarriers.pass_over,
    sm90.ArriveFull: mbarriers.arrive_full,
    sm90.HandOver: _guarded(mbarriers.hand_over),
    sm90.TakeOver: _guarded(mbarriers.take_over),
    sm90.ReduceFragment: _guarded(_reduce_fragment),
    sm90.Wgmma: _wgmma,
    sm90.WaitWgmma: _wait_wgmma,
    sm90.SettleNumbers: _settle_numbers,
    sm90.ConsumerBarrier: _consumer_barrier,
    sm90.WarpgroupBarrier: _warpgroup_barrier,
    sm90.FirstTurn: _first_turn,
    sm90.WaitTurn: _wait_turn,
    sm90.PassTurn: _pass_turn,
    sm90.Describe: _describe,
    sm90.Broadcast: BASE[Counter],
    sm90.MapColumns: _guarded(BASE[MapFragment]),
    sm90.HoldColumns: _guarded(BASE[MapFragment]),
    sm90.MapAsking: _guarded(BASE[MapFragment]),
    sm90.IfAnyLarge: _if_any_large,
    sm90.Rescore: _guarded(_rescore),
    sm90.LoadMatrix: _guarded(_load_matrix),
    sm90.FenceStores: _fence_stores,
    sm90.FenceReads: _fence_reads,
    sm90.TmaStore: _tma_store,
    sm90.WaitStored: _wait_stored,
    sm90.AskTile: _ask_tile,
    sm90.PublishTile: mbarriers.publish_tile,
    sm90.TakeTile: mbarriers.take_tile,
}
