"""The meaning of the statements of machine/sm90.py for one warp: loads, phases of mbarriers, products in flight.

An mbarrier is the number of its phases that have ended. A wait for parity P passes once a phase of that parity is the
last that ended (PTX ISA, "mbarrier.try_wait"). A load by TMA ends its phase at once but lands at the first wait for it,
and each warp has to wait itself before it may read. A product's operands are read when it is issued; its result appears
at its wait, and until then the accumulator does not exist and a register operand may not be written.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashgen.interp.fragments import columns_of, get, hazard, rows_of
from flashgen.interp.machine_base import RUN as BASE
from flashgen.interp.shared_memory import InFlight
from flashgen.interp.warps import Block, Meaning, Steps, Waiting, Warp
from flashgen.ir.graph import access
from flashgen.ir.nodes import Stmt, Tile, name_of
from flashgen.machine import sm90

Stage = tuple[str, int]


@dataclass
class Phases:
    """The two mbarriers of one stage of a tile."""

    full: int = 0
    empty: int = 0
    arrived: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    flying: list[InFlight] = field(default_factory=list)


@dataclass
class State:
    """What the block's warps share beside memory: mbarriers, products in flight of each warp, the named barrier."""

    phases: dict[Stage, Phases] = field(default_factory=lambda: defaultdict(Phases))
    products: dict[int, list[tuple[sm90.Wgmma, np.ndarray]]] = field(default_factory=lambda: defaultdict(list))
    meeting: set[int] = field(default_factory=set)
    meetings: int = 0


def state(block: Block) -> State:
    return vars(block).setdefault("sm90", State())


def _phases(block: Block, warp: Warp, tile: Tile) -> Phases:
    return state(block).phases[tile.buffer, warp.uniform(tile.stage)]


def _init_barriers(block: Block, warp: Warp, stmt: sm90.InitBarriers) -> Steps:
    yield from block.meet(warp, stmt)


def _role(block: Block, warp: Warp, stmt: sm90.Role) -> Steps:
    """The producer is one thread: here the first warp behind the computing ones."""
    computing = warp.index < block.plan.computing_warps
    if computing == (stmt.role == "consumer") and warp.index <= block.plan.computing_warps:
        yield from block.steps(warp, stmt.body)


def _tma_load(block: Block, warp: Warp, stmt: sm90.TmaLoad) -> None:
    name, phases = stmt.dst.buffer, _phases(block, warp, stmt.dst)
    rows, columns = (np.arange(size) for size in block.shape(name))
    value = block.load(warp, stmt.src, block.shape(name), rows[:, None], columns)
    if phases.flying:
        raise hazard(warp, stmt, f"{name} is loaded while an earlier load of the same stage is in flight")
    phases.flying.append(block.shared.issue(block.access(warp, stmt, stmt.dst), value, rows[:, None], columns))
    phases.full += 1
    phases.seen.clear()


def _wait_full(block: Block, warp: Warp, stmt: sm90.WaitFull) -> Steps:
    phases, parity = _phases(block, warp, stmt.tile), warp.uniform(stmt.parity)
    yield Waiting(lambda: phases.full % 2 != parity)
    for copy in phases.flying:
        block.shared.land(copy)
        block.shared.publish(copy)
    phases.flying.clear()
    phases.seen.add(warp.index)


def _wait_empty(block: Block, warp: Warp, stmt: sm90.WaitEmpty) -> Steps:
    phases, parity = _phases(block, warp, stmt.tile), warp.uniform(stmt.parity)
    yield Waiting(lambda: phases.empty % 2 != parity)
    block.shared.release(block.access(warp, stmt, stmt.tile))


def _arrive_empty(block: Block, warp: Warp, stmt: sm90.ArriveEmpty) -> None:
    phases = _phases(block, warp, stmt.tile)
    place = stmt.tile.buffer, warp.uniform(stmt.tile.stage)
    for product, _ in state(block).products[warp.index]:
        for tile in product.reads():
            if isinstance(tile, Tile) and (tile.buffer, warp.uniform(tile.stage)) == place:
                raise hazard(warp, stmt, f"{tile.buffer} is released while a product in flight reads it")
    if warp.index in phases.arrived:
        raise hazard(warp, stmt, f"arrives twice in one phase of {stmt.tile.buffer}")
    phases.seen.discard(warp.index)
    phases.arrived.add(warp.index)
    if len(phases.arrived) == block.plan.computing_warps:
        phases.arrived.clear()
        phases.empty += 1


def _wgmma(block: Block, warp: Warp, stmt: sm90.Wgmma) -> None:
    rows, columns = rows_of(block, warp, stmt.acc), columns_of(block, warp, stmt.acc)
    b = _operand(block, warp, stmt, stmt.b, columns, stmt.transpose_b)
    if isinstance(stmt.a, Tile):
        a = _operand(block, warp, stmt, stmt.a, rows, False).T
    else:
        a = get(warp, stmt, name_of(stmt.a))
    product = np.matmul(a, b)
    if stmt.accumulate:
        product += get(warp, stmt, stmt.acc)
    warp.registers.pop(stmt.acc, None)
    state(block).products[warp.index].append((stmt, product))
    block.trace.matrix(block.plan.arch, len(rows) * len(columns) * a.shape[1])


def _operand(block: Block, warp: Warp, stmt: sm90.Wgmma, tile: Tile, part: np.ndarray, by_row: bool) -> np.ndarray:
    """[depth, part]: rows of a tile transposed (a, and b kept as [n][k]), or its columns."""
    if warp.index not in _phases(block, warp, tile).seen:
        raise hazard(warp, stmt, f"{tile.buffer} is read without a wait for its load")
    height, width = block.shape(tile.buffer)
    whole = by_row or tile == stmt.a
    index = (part[:, None], np.arange(width)) if whole else (np.arange(height)[:, None], part)
    value = block.shared.read(block.access(warp, stmt, tile), *index)
    return value.T if whole else value


def _wait_wgmma(block: Block, warp: Warp, stmt: sm90.WaitWgmma) -> None:
    flying = state(block).products[warp.index]
    done = {}
    while len(flying) > stmt.pending:
        product, value = flying.pop(0)
        done[product.acc] = value
    if set(stmt.done) != set(done):
        raise hazard(warp, stmt, f"finishes {sorted(done)}, not {sorted(stmt.done)}")
    warp.registers |= done


def _consumer_barrier(block: Block, warp: Warp, stmt: sm90.ConsumerBarrier) -> Steps:
    shared = state(block)
    shared.meeting.add(warp.index)
    if len(shared.meeting) < block.plan.computing_warps:
        count = shared.meetings
        yield Waiting(lambda: shared.meetings > count)
        return
    shared.meeting.clear()
    shared.meetings += 1
    block.shared.barrier()


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
    sm90.TmaLoad: _tma_load,
    sm90.WaitFull: _wait_full,
    sm90.WaitEmpty: _wait_empty,
    sm90.ArriveEmpty: _arrive_empty,
    sm90.Wgmma: _wgmma,
    sm90.WaitWgmma: _wait_wgmma,
    sm90.ConsumerBarrier: _consumer_barrier,
}
