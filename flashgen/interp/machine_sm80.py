"""The meaning of the statements of machine/sm80.py for one warp."""

from __future__ import annotations

import numpy as np

from flashgen.interp import tf32
from flashgen.interp.fragments import columns_of, get, hazard, rows_of
from flashgen.interp.machine_base import tile_share
from flashgen.interp.warps import Block, Meaning, Warp
from flashgen.ir.nodes import Tile
from flashgen.machine import sm80


def _copy_tile_async(block: Block, warp: Warp, stmt: sm80.CopyTileAsync) -> None:
    name = stmt.dst.buffer
    rows, columns = tile_share(block, warp, name)
    value = block.load(warp, stmt.src, block.shape(name), rows, columns)
    warp.uncommitted.append(block.shared.issue(block.access(warp, stmt, stmt.dst), value, rows, columns))
    block.trace.shared(block.plan.arch, block.shared.nbytes(name, value.size))


def _copy_tile_elements(block: Block, warp: Warp, stmt: sm80.CopyTileElements) -> None:
    name = stmt.dst.buffer
    rows, columns = tile_share(block, warp, name)
    value = block.load(warp, stmt.src, block.shape(name), rows, columns)
    block.shared.write(block.access(warp, stmt, stmt.dst), value, rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(name, value.size))


def _copy_vector_async(block: Block, warp: Warp, stmt: sm80.CopyVectorAsync) -> None:
    name = stmt.dst.buffer
    rows = np.arange(*block.shape(name))
    rows = rows[rows % block.plan.computing_threads // 32 == warp.index]
    value = block.load(warp, stmt.src, block.shape(name), rows)
    warp.uncommitted.append(block.shared.issue(block.access(warp, stmt, stmt.dst), value, rows))
    block.trace.shared(block.plan.arch, block.shared.nbytes(name, value.size))


def _commit_group(block: Block, warp: Warp, stmt: sm80.CommitGroup) -> None:
    warp.groups.append(warp.uncommitted)
    warp.uncommitted = []


def _wait_group(block: Block, warp: Warp, stmt: sm80.WaitGroup) -> None:
    """Copies land here at the latest; reading them earlier is an error, so when exactly they do cannot be seen."""
    while len(warp.groups) > stmt.pending:
        for copy in warp.groups.pop(0):
            block.shared.land(copy)


def _mma_sync(block: Block, warp: Warp, stmt: sm80.MmaSync) -> None:
    rows, columns = rows_of(block, warp, stmt.acc), columns_of(block, warp, stmt.acc)
    b = _operand(block, warp, stmt, stmt.b, columns, stmt.transpose_b)
    if isinstance(stmt.a, Tile):
        a = _operand(block, warp, stmt, stmt.a, rows, not stmt.transpose_a).T
    else:
        a = _register_operand(block, warp, stmt)
    product = tf32.matmul(block.buffers[stmt.b.buffer].dtype, a, b)
    if stmt.accumulate:
        product += get(warp, stmt, stmt.acc)
    warp.registers[stmt.acc] = product
    block.trace.matrix(block.plan.arch, len(rows) * len(columns) * a.shape[1])


def _operand(block: Block, warp: Warp, stmt: sm80.MmaSync, tile: Tile, part: np.ndarray, by_row: bool) -> np.ndarray:
    """[depth, part]: some columns of a shared tile, or some rows, transposed."""
    height, width = block.shape(tile.buffer)
    rows, columns = (part[:, None], np.arange(width)) if by_row else (np.arange(height)[:, None], part)
    value = block.shared.read(block.access(warp, stmt, tile), rows, columns)
    block.trace.shared(block.plan.arch, block.shared.nbytes(tile.buffer, value.size))
    return value.T if by_row else value


def _register_operand(block: Block, warp: Warp, stmt: sm80.MmaSync) -> np.ndarray:
    """A packed register tile: a warp needs whole rows, the same as those of its part of the accumulator."""
    assert isinstance(stmt.a, str)
    operand, acc = block.buffers[stmt.a], block.buffers[stmt.acc]
    assert operand.warps is not None and acc.warps is not None
    if stmt.transpose_a or operand.warps[1] != 1 or operand.warps[0] != acc.warps[0]:
        raise hazard(warp, stmt, f"{stmt.a} ({operand.warps}) lies otherwise than {stmt.acc} ({acc.warps}) needs")
    if operand.dtype != block.buffers[stmt.b.buffer].dtype:
        raise hazard(warp, stmt, f"{stmt.a} is {operand.dtype}, not of the type of {stmt.b.buffer}")
    return get(warp, stmt, stmt.a)


RUN: dict[type, Meaning] = {
    sm80.CopyTileAsync: _copy_tile_async,
    sm80.CopyTileElements: _copy_tile_elements,
    sm80.CopyVectorAsync: _copy_vector_async,
    sm80.CommitGroup: _commit_group,
    sm80.WaitGroup: _wait_group,
    sm80.MmaSync: _mma_sync,
}
