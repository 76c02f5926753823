"""What passes, the emitter and the runtime ask of an sm90 kernel: its descriptors, its arrivals, what TMA touches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashgen.ir.nodes import Kernel, Tile
from flashgen.ir.visit import statements
from flashgen.machine.sm90 import (
    FIRST_COLUMNS,
    OWN_COLUMNS,
    OWN_ROWS,
    WARPGROUP_ROWS,
    WARPGROUP_WARPS,
    ArriveEmpty,
    ArriveFull,
    Describe,
    Role,
    TmaLoad,
    TmaStore,
    Wgmma,
)


def operands(kernel: Kernel, stmt: Wgmma) -> tuple[Describe, ...]:
    """The shared operands of a product, as their descriptors have to be."""
    warps = kernel.buffer(stmt.acc).warps
    assert warps is not None
    by_columns, alone = warps[1] > 1, warps == (WARPGROUP_WARPS, 1)
    found = []
    if isinstance(stmt.a, Tile):
        down = "" if by_columns else OWN_COLUMNS
        found.append(Describe(stmt.a, "" if alone else down if stmt.transpose_a else OWN_ROWS))
    whole = FIRST_COLUMNS if stmt.columns else ""
    return (*found, Describe(stmt.b, OWN_COLUMNS if by_columns else whole))


def arrivals(kernel: Kernel, computing_warps: int) -> dict[tuple[str, str], int]:
    """How many arrivals end a phase of the mbarriers of a tile: (tile, "full" or "empty") -> count.

    One of the loading thread, which counts bytes too; else one of each warp that computes in a role that arrives.
    """
    found: dict[tuple[str, str], int] = {}
    for role in (stmt for stmt in kernel.body if isinstance(stmt, Role)):
        warps = WARPGROUP_WARPS if role.warpgroup is not None else computing_warps
        arriving = {
            (stmt.tile.buffer, "full" if isinstance(stmt, ArriveFull) else "empty")
            for stmt in statements(role.body)
            if isinstance(stmt, ArriveFull | ArriveEmpty)
        }
        for barrier in arriving:
            found[barrier] = found.get(barrier, 0) + warps
    return found


def mapped(kernel: Kernel) -> set[str]:
    """Global arrays that TMA touches: the kernel takes a tensor map for each instead of an address and strides."""
    return {array for array, _ in _transfers(kernel)}


def box(kernel: Kernel, array: str, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Positions and heads that one copy by TMA moves: the shared tile, or a warpgroup's 64 rows of one that is stored.

    Raises ValueError where the rows of a warpgroup are no box.
    """
    stmt = next(stmt for name, stmt in _transfers(kernel) if name == array)
    if isinstance(stmt, TmaLoad):
        heads = stmt.src.heads
        return sizes[kernel.buffer(stmt.dst.buffer).shape[0]] // heads, heads
    positions = sizes[kernel.buffer(stmt.src.buffer).shape[0]] // stmt.dst.heads
    if WARPGROUP_ROWS % positions and positions % WARPGROUP_ROWS:
        raise ValueError(f"{kernel.name}: {WARPGROUP_ROWS} rows of heads of {positions} are no box")
    return min(positions, WARPGROUP_ROWS), max(WARPGROUP_ROWS // positions, 1)


def _transfers(kernel: Kernel) -> Iterator[tuple[str, TmaLoad | TmaStore]]:
    for stmt in statements(kernel.body):
        if isinstance(stmt, TmaLoad):
            yield stmt.src.buffer, stmt
        elif isinstance(stmt, TmaStore):
            yield stmt.dst.buffer, stmt
