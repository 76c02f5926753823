"""The meaning of the statements of machine/sm90.py on mbarriers: loads, waits, arrivals, what goes from warp to warp.

An mbarrier is the number of its phases that have ended. A wait for parity P passes once a phase of that parity is the
last that ended (PTX ISA, "mbarrier.try_wait"). A load by TMA ends its phase at once but lands at the first wait for it,
and each warp has to wait itself before it may read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashgen.interp.fragments import columns_of, get, hazard, rows_of
from flashgen.interp.sm90_state import Phases, state
from flashgen.interp.warps import Block, Steps, Waiting, Warp
from flashgen.ir.nodes import Stmt, Tile
from flashgen.machine import sm90


def phases_of(block: Block, warp: Warp, tile: Tile) -> Phases:
    return state(block).phases[tile.buffer, warp.uniform(tile.stage)]


def tma_load(block: Block, warp: Warp, stmt: sm90.TmaLoad) -> None:
    name, phases = stmt.dst.buffer, phases_of(block, warp, stmt.dst)
    rows, columns = (np.arange(size) for size in block.shape(name))
    value = block.load(warp, stmt.src, block.shape(name), rows[:, None], columns)
    if phases.flying:
        raise hazard(warp, stmt, f"{name} is loaded while an earlier load of the same stage is in flight")
    phases.flying.append(block.shared.issue(block.access(warp, stmt, stmt.dst), value, rows[:, None], columns))
    phases.beside, phases.missing = stmt.beside, set(stmt.beside)
    phases.full += not phases.missing
    phases.seen.clear()


def load_vector(block: Block, warp: Warp, stmt: sm90.LoadVector) -> None:
    name, phases = stmt.dst.buffer, phases_of(block, warp, stmt.tile)
    if name not in phases.missing:
        raise hazard(warp, stmt, f"the load of {stmt.tile.buffer} does not count the bytes of {name}")
    rows = np.arange(*block.shape(name))
    value = block.load(warp, stmt.src, block.shape(name), rows)
    phases.flying.append(block.shared.issue(block.access(warp, stmt, stmt.dst), value, rows))
    phases.missing.discard(name)
    phases.full += not phases.missing


def hand_over(block: Block, warp: Warp, stmt: sm90.HandOver) -> None:
    value = get(warp, stmt, stmt.src)
    rows, columns = rows_of(block, warp, stmt.src)[:, None], columns_of(block, warp, stmt.src)
    block.shared.write(block.access(warp, stmt, stmt.dst), value, rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(stmt.dst.buffer, value.size))


def arrive_full(block: Block, warp: Warp, stmt: sm90.ArriveFull) -> None:
    phases = phases_of(block, warp, stmt.tile)
    block.shared.hand_over(block.access(warp, stmt, stmt.tile))
    if _arrived(block, warp, stmt, phases.filled, stmt.tile.buffer, "full"):
        phases.full += 1
        phases.seen.clear()


def take_over(block: Block, warp: Warp, stmt: sm90.TakeOver) -> None:
    if warp.index not in phases_of(block, warp, stmt.src).seen:
        raise hazard(warp, stmt, f"{stmt.src.buffer} is read without a wait for it")
    rows, columns = rows_of(block, warp, stmt.dst)[:, None], columns_of(block, warp, stmt.dst)
    value = block.shared.read(block.access(warp, stmt, stmt.src), rows, columns)
    warp.registers[stmt.dst] = value
    block.trace.shared(block.plan.arch, block.shared.nbytes(stmt.src.buffer, value.size))


def wait_full(block: Block, warp: Warp, stmt: sm90.WaitFull | sm90.PassOver) -> Steps:
    phases, parity = phases_of(block, warp, stmt.tile), warp.uniform(stmt.parity)
    yield Waiting(lambda: phases.full % 2 != parity)
    for copy in phases.flying:
        block.shared.land(copy)
        block.shared.publish(copy)
    phases.flying.clear()
    phases.seen.add(warp.index)


def wait_empty(block: Block, warp: Warp, stmt: sm90.WaitEmpty) -> Steps:
    phases, parity = phases_of(block, warp, stmt.tile), warp.uniform(stmt.parity)
    yield Waiting(lambda: phases.empty % 2 != parity)
    for name in (stmt.tile.buffer, *phases.beside):
        block.shared.release(block.access(warp, stmt, replace(stmt.tile, buffer=name)))


def arrive_empty(block: Block, warp: Warp, stmt: sm90.ArriveEmpty | sm90.PassOver) -> None:
    phases = phases_of(block, warp, stmt.tile)
    place = stmt.tile.buffer, warp.uniform(stmt.tile.stage)
    for product, _ in state(block).products[warp.index]:
        for tile in product.reads():
            if isinstance(tile, Tile) and (tile.buffer, warp.uniform(tile.stage)) == place:
                raise hazard(warp, stmt, f"{tile.buffer} is released while a product in flight reads it")
    if phases.full and warp.index not in phases.seen:
        raise hazard(warp, stmt, f"{stmt.tile.buffer} is released without a wait for what landed in this stage")
    if warp.index in phases.unfenced:
        raise hazard(warp, stmt, f"{stmt.tile.buffer} is released with no fence since it was read")
    phases.seen.discard(warp.index)
    phases.empty += _arrived(block, warp, stmt, phases.arrived, stmt.tile.buffer, "empty")


def pass_over(block: Block, warp: Warp, stmt: sm90.PassOver) -> Steps:
    yield from wait_full(block, warp, stmt)
    arrive_empty(block, warp, stmt)


def _arrived(block: Block, warp: Warp, stmt: Stmt, before: set[int], name: str, kind: str) -> bool:
    """The arrival of one warp at a barrier, behind those of `before`; True where it is the last of the phase."""
    if warp.index in before:
        raise hazard(warp, stmt, f"arrives twice in one phase of {name}")
    before.add(warp.index)
    last = len(before) == state(block).arrivals[name, kind]
    if last:
        before.clear()
    return last


def publish_tile(block: Block, warp: Warp, stmt: sm90.PublishTile) -> None:
    phases = phases_of(block, warp, stmt.dst)
    phases.value = [warp.uniform(value) for value in stmt.values]
    phases.full += 1
    phases.seen.clear()


def take_tile(block: Block, warp: Warp, stmt: sm90.TakeTile) -> None:
    phases = phases_of(block, warp, stmt.src)
    if warp.index not in phases.seen:
        raise hazard(warp, stmt, f"{stmt.src.buffer} is read without a wait for it")
    warp.names |= {name: value for name, value in zip(stmt.names, phases.value, strict=False) if name}
