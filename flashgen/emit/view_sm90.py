"""View models of the statements of the sm90 family: mbarriers, boxes of TMA, instructions of wgmma."""

from __future__ import annotations

from flashgen.attention.lengths import batch_rows
from flashgen.emit.cexpr import c_text
from flashgen.emit.names import Fields, Names, camel, positions, width
from flashgen.ir.expr import Var
from flashgen.ir.nodes import Tile, Window, name_of
from flashgen.machine import sm90
from flashgen.machine.sm90_facts import arrivals, operands


def instruction(stmt: sm90.Wgmma, names: Names) -> str:
    """The name of the device function that issues a product."""
    kind = "registers" if isinstance(stmt.a, str) else "shared_transposed" if stmt.transpose_a else "shared"
    return f"wgmma_64x{width(stmt, names)}x16_{kind}"


def hopper(stmt: sm90.Sm90Stmt, names: Names) -> Fields:
    """What the statements of the sm90 family have beside their fields."""
    if isinstance(stmt, sm90.Wgmma):
        a = names.kernel.buffer(stmt.a if isinstance(stmt.a, str) else stmt.a.buffer)
        *shared_a, b = operands(names.kernel, stmt)
        return {
            "instruction": instruction(stmt, names),
            "depth": a.shape[0 if stmt.transpose_a else 1].upper(),
            "a_operand": names.operand(shared_a[0]) if shared_a else "",
            "a_order": "mn_major" if stmt.transpose_a else "k_major",
            "b_operand": names.operand(b),
            "b_order": "k_major" if stmt.transpose_b else "mn_major",
            "accumulated": "1" if stmt.accumulate else "k > 0",
        }
    if isinstance(stmt, sm90.MapAsking):
        return {"columns": [name for name in map(name_of, stmt.reads()) if names.kernel.buffer(name).by_column]}
    if isinstance(stmt, sm90.LoadVector):
        return {"full": _barrier(stmt.tile, "full", names)}
    if isinstance(stmt, sm90.TmaLoad):
        policy = "keep_in_cache" if stmt.reuse else "leave_cache_first"
        beside = [f"{names.kernel.buffer(name).shape[0].upper()} * 4" for name in stmt.beside]
        more = {"full": _barrier(stmt.dst, "full", names), "policy": policy, "beside_bytes": " + ".join(beside)}
        return _box(stmt.src, "load", names) | more
    if isinstance(stmt, sm90.LoadMatrix):
        return {"load": "load_matrix_transposed" if stmt.transposed else "load_matrix"}
    if isinstance(stmt, sm90.TmaStore):
        tile = camel(stmt.src.buffer)
        of_each = positions(stmt.dst, names.kernel.buffer(stmt.src.buffer), names)
        parts = [tile, of_each or f"{tile}::ROWS", str(stmt.across)] if stmt.across else [tile, of_each]
        return _box(stmt.dst, "store", names) | {"types": ", ".join(filter(None, parts))}
    if isinstance(stmt, sm90.Describe):
        step = {sm90.OWN_ROWS: "WARPGROUP_STEP", sm90.OWN_COLUMNS: "PANEL_STEP"}.get(stmt.part, "")
        panels = names.panels(stmt.tile) if stmt.part == sm90.OWN_COLUMNS else 1
        own = f"warpgroup * {panels}" if panels > 1 else "warpgroup"
        return {"operand": names.operand(stmt), "step": step, "own": own}
    if isinstance(stmt, sm90.PublishTile):
        values = ", ".join(names.uniform(value) for value in stmt.values)
        return {"full": _barrier(stmt.dst, "full", names), "published": values}
    if isinstance(stmt, sm90.TakeTile):
        return {"parts": [{"name": name, "index": index} for index, name in enumerate(stmt.names) if name]}
    if isinstance(stmt, sm90.WaitFull | sm90.WaitEmpty):
        kind = "full" if isinstance(stmt, sm90.WaitFull) else "empty"
        return {kind: _barrier(stmt.tile, kind, names), "parity": names.uniform(stmt.parity)}
    if isinstance(stmt, sm90.PassOver):
        full, empty = (_barrier(stmt.tile, kind, names) for kind in ("full", "empty"))
        return {"full": full, "empty": empty, "parity": names.uniform(stmt.parity)}
    if isinstance(stmt, sm90.ArriveFull):
        return {"full": _barrier(stmt.tile, "full", names)}
    if isinstance(stmt, sm90.ArriveEmpty):
        return {"empty": _barrier(stmt.tile, "empty", names), "lanes_read": _lanes_read(stmt.tile.buffer, names)}
    if isinstance(stmt, sm90.InitBarriers):
        return {"barriers": _initial(names)}
    if isinstance(stmt, sm90.Role):
        whole = "threadIdx.x < THREADS"
        own = whole if stmt.warpgroup is None else f"warpgroup == {stmt.warpgroup}"
        return {"is_producer": stmt.role == "producer", "condition": own}
    return {}


def _initial(names: Names) -> list[Fields]:
    """The mbarriers with the arrivals that each expects."""
    counts = arrivals(names.kernel, names.plan.computing_warps)
    found: list[Fields] = []
    for name, _, count in names.plan.barriers:
        tile, kind = name.rsplit("_", 1)
        found.append({"name": name, "count": count, "arrivals": counts.get((tile, kind), 1)})
    return found


def _lanes_read(tile: str, names: Names) -> str:
    """What every lane of a warp reads by itself of a stage, in words."""
    buffer = names.kernel.buffer(tile)
    if (len(buffer.shape) == 2 and not names.is_tile(buffer)) or tile in names.loaded_as_matrices:
        return "it"
    return "the vectors that came with it" if tile in names.accompanied else ""


def _box(window: Window, direction: str, names: Names) -> Fields:
    """Where TMA copies from or to, and the device function: that of rows which end before their tensor."""
    batch, head, row, *column = (names.uniform(index) for index in window.origin)
    if window.rows is None:
        found = {"tensor": window.buffer, "move": f"tma_{direction}", "position": f"{row}, {head}, {batch}"}
        return {**found, "column": "".join(f", {index}" for index in column)}
    through = batch_rows(window.buffer)
    if through in names.scalars:
        row = names.uniform(window.origin[0] * Var(through) + window.origin[2])
    position = f"{row}, {names.uniform(window.rows)}, {head}"
    return {"tensor": window.buffer, "move": f"tma_{direction}_rows", "position": position, "column": ""}


def _barrier(tile: Tile, kind: str, names: Names) -> str:
    name = f"{tile.buffer}_{kind}"
    if names.at_first_stage(tile):
        return name
    return f"{name} + {c_text(tile.stage, names.variable, parent=5)}"
