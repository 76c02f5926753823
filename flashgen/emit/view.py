"""View models: what a macro is handed for one statement, with every name already spelled."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

from flashgen.attention.lengths import batch_rows
from flashgen.emit.cexpr import c_text, no_element
from flashgen.ir.dtype import OPERANDS
from flashgen.ir.expr import (
    PRECEDENCE,
    Binary,
    Cast,
    Compare,
    Const,
    Expr,
    I,
    J,
    Load,
    Random,
    Var,
    children,
    rebuild,
    replaced,
    walk,
)
from flashgen.ir.nodes import Buffer, For, If, Kernel, Let, Place, Space, Stmt, Tile, Window, name_of
from flashgen.ir.visit import statements
from flashgen.machine import base, sm90
from flashgen.machine.sm80 import MmaSync
from flashgen.machine.sm90_facts import arrivals, operands
from flashgen.plan.plan import Plan

Fields = dict[str, object]
COL_OFFSET, LANE_COL = Var("col_offset"), Var("lane_col")


def camel(name: str) -> str:
    """q_tile -> QTile."""
    return "".join(part.capitalize() for part in name.split("_"))


class Names:
    """How the names of one kernel are spelled in its CUDA."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        self.kernel = kernel
        self.plan = plan
        self.sizes = plan.sizes
        self.dims = {name for name, _ in plan.dims}
        self.scalars = {scalar.name for scalar in kernel.scalars}
        self.fragments = self._fragments()

    def _fragments(self) -> dict[str, str]:
        """Register buffer -> the type of its layout; tiles of one shape and division share the first one's name."""
        names: dict[tuple, str] = {}
        result = {}
        for buffer in self.kernel.buffers:
            if buffer.space is Space.REGISTER and len(buffer.shape) == 2:
                layout = (buffer.shape, buffer.warps, (buffer.first_warp, buffer.copies))
                result[buffer.name] = names.setdefault(layout, camel(buffer.name))
        rows = {(shape[0], warps[0]): name for (shape, warps, _), name in reversed(names.items())}
        columns = {(shape[1], warps): name for (shape, warps, _), name in reversed(names.items())}
        for buffer in self.kernel.buffers:
            if buffer.space is Space.REGISTER and len(buffer.shape) == 1:
                assert buffer.warps is not None
                by_row = (buffer.shape[0], buffer.warps[0])
                own = columns[buffer.shape[0], buffer.warps] if buffer.by_column else rows[by_row]
                result[buffer.name] = own
        return result

    def variable(self, name: str) -> str:
        """A dimension is a constant of the kernel, a scalar one of its arguments, anything else a local."""
        if name in self.dims:
            return name.upper()
        return f"args.{name}" if name in self.scalars else name

    def at_first_stage(self, tile: Tile) -> bool:
        """True where a stage needs no offset; a tile of one stage keeps the count of its rounds in the expression."""
        return tile.stage == Const(0) or self.kernel.buffer(tile.buffer).stages == 1

    def operand(self, described: sm90.Describe) -> str:
        """The variable that holds a tile's descriptor; it names the part of a tile of which several are read."""
        several = len(self._parts.get(described.tile.buffer, ())) > 1
        part = described.part.replace(" ", "_") or "whole"
        return f"{described.tile.buffer}_{part if several else 'operand'}"

    @cached_property
    def accompanied(self) -> set[str]:
        """Tiles with which vectors land."""
        loads = (stmt for stmt in statements(self.kernel.body) if isinstance(stmt, sm90.TmaLoad))
        return {stmt.dst.buffer for stmt in loads if stmt.beside}

    @cached_property
    def loaded_as_matrices(self) -> set[str]:
        """Tiles that warps load into registers."""
        return {stmt.src.buffer for stmt in statements(self.kernel.body) if isinstance(stmt, sm90.LoadMatrix)}

    @cached_property
    def _parts(self) -> dict[str, set[str]]:
        """The parts of each shared tile that products read."""
        found: dict[str, set[str]] = {}
        for stmt in statements(self.kernel.body):
            for item in operands(self.kernel, stmt) if isinstance(stmt, sm90.Wgmma) else ():
                found.setdefault(item.tile.buffer, set()).add(item.part)
        return found

    def panels(self, tile: Tile) -> int:
        """Panels of a tile that each warpgroup reads, where they divide its columns."""
        products = (stmt for stmt in statements(self.kernel.body) if isinstance(stmt, sm90.Wgmma))
        found = (
            width(stmt, self)
            for stmt in products
            for item in operands(self.kernel, stmt)
            if item.tile.buffer == tile.buffer and item.part == sm90.OWN_COLUMNS and item.tile == stmt.b
        )
        return next(found, sm90.PANEL) // sm90.PANEL

    def is_tile(self, buffer: Buffer) -> bool:
        """True for rows of elements of a type that products take."""
        return len(buffer.shape) == 2 and buffer.dtype in OPERANDS

    def in_panels(self, buffer: Buffer) -> bool:
        """True for a shared tile as TMA moves it."""
        return buffer.space is Space.SHARED and self.plan.placement(buffer.name).swizzled

    def uniform(self, expr: Expr, parent: int = 0) -> str:
        return c_text(expr, self.variable, self._uniform_element, parent)

    def _uniform_element(self, load: Load) -> str:
        """A number that is the same for all threads, from an array that is read by element."""
        if not self.kernel.buffer(load.buffer).by_element:
            return no_element(load)
        return f"args.{load.buffer}.at({', '.join(self.uniform(part) for part in load.index)})"

    def place(self, place: Place) -> str:
        """Registers by name, a stage of shared memory by address, a window by the address of its first element."""
        if isinstance(place, str):
            return place
        if isinstance(place, Window):
            return f"args.{place.buffer}.at({', '.join(self.uniform(index) for index in place.origin)})"
        buffer = self.kernel.buffer(place.buffer)
        if self.at_first_stage(place):
            return place.buffer
        size = f"{camel(buffer.name)}::BYTES" if self.is_tile(buffer) else self._length(buffer)
        return f"{place.buffer} + {c_text(place.stage, self.variable, parent=6)} * {size}"

    def _length(self, buffer: Buffer) -> str:
        """Elements from stage to stage of what is no tile."""
        if buffer.shape:
            return " * ".join(dim.upper() for dim in buffer.shape)
        return str(self.plan.placement(buffer.name).stage_bytes // buffer.dtype.bytes)

    def element(self, expr: Expr, dst: Buffer, column: str = "j", row: str = "i") -> str:
        """The expression for the element (row, column) of this thread's part of a register buffer."""
        fragment = self.fragments[dst.name]
        loads = any(isinstance(node, Load) and self.kernel.buffer(node.buffer).by_element for node in walk(expr))
        branch = self.plan.arch.family != "sm90" and not loads  # around a branch no product runs meanwhile
        spelled = {
            "i": f"{fragment}::row({row})",
            "j": f"{fragment}::col({column})",
            COL_OFFSET.name: f"{fragment}::col_offset({column})",
            LANE_COL.name: f"{fragment}::lane_col()",
        }
        if dst.by_column:
            held = f"held_column<{fragment}>(k)"
            spelled = {"j": held, COL_OFFSET.name: held, LANE_COL.name: "0"}

        def name(variable: str) -> str:
            return spelled.get(variable) or self.variable(variable)

        def element(load: Load) -> str:
            if not self.kernel.buffer(load.buffer).by_element:
                return self._load(load, fragment, column, row)
            index = ", ".join(c_text(part, name, element, branch=branch) for part in load.index)
            return f"args.{load.buffer}.at({index})"

        return c_text(_by_offset(expr), name, element, branch=branch)

    def _load(self, load: Load, fragment: str, column: str, row: str) -> str:
        buffer = self.kernel.buffer(load.buffer)
        if buffer.by_column:
            return f"{load.buffer}_{column}"
        if buffer.space is Space.REGISTER:
            indices = {I: row, J: column}
            if buffer.dtype.bytes == 2:
                return f"unpacked<{buffer.dtype.cuda}>({load.buffer}[{row}][({column}) / 2], ({column}) % 2)"
            return load.buffer + "".join(f"[{indices[index]}]" for index in load.index)  # type: ignore[index]
        coordinates = {I: f"{fragment}::row({row})", J: f"{fragment}::col({column})"}
        if len(buffer.shape) == 2:
            first, second = (coordinates[index] for index in load.index)  # type: ignore[index]
            return f"{camel(buffer.name)}::at<element>({buffer.name}, {first}, {second})"
        *stage, index = load.index
        start = f"{c_text(stage[0], self.variable, parent=6)} * {buffer.shape[0].upper()} + " if stage else ""
        return f"{buffer.name}[{start}{coordinates[index]}]"  # type: ignore[index]

    def rows_left(self, window: Window) -> str:
        """Rows of the tensor from the window's first one on: what a copy may touch. A padded one has whole blocks."""
        if window.rows is not None:
            return self.uniform(window.rows)
        limit = self.kernel.buffer(window.buffer).shape[2]
        return "BLOCK_Q" if limit.endswith("_padded") else self.uniform(Var(limit) - window.origin[2])


def _by_offset(expr: Expr) -> Expr:
    """A column that is compared alone, as its constant part: what it is compared with then takes the lane's part.

    So for a column that is added to a row, or taken from it, as floats.
    """
    expr = rebuild(expr, _by_offset)
    match expr:
        case Compare(op, x, y) if x == J:
            return Compare(op, COL_OFFSET, y - LANE_COL)
        case Binary("+" | "-" as op, Cast(dtype, row), Cast(_, column)) if column == J:
            return Binary(op, Cast(dtype, Binary(op, row, LANE_COL)), Cast(dtype, COL_OFFSET))
    return expr


def statement(stmt: Stmt, names: Names, body: str) -> Fields:
    """The fields of one statement, spelled; `body` is the text of its inner statements."""
    view: Fields = {"note": stmt.note, "body": body}
    if isinstance(stmt, For):
        stop = names.uniform(stmt.stop, PRECEDENCE["+"])  # it stands behind a comparison
        view |= {"axis": stmt.axis, "start": names.uniform(stmt.start), "stop": stop}
        return view | {"stays_rolled": any(isinstance(inner, sm90.TmaLoad) for inner in stmt.body)}
    if isinstance(stmt, If):
        return view | {"condition": names.uniform(stmt.condition)}
    if isinstance(stmt, Let | base.Counter | base.Assign | sm90.Broadcast):
        return view | {"name": stmt.name, "value": names.uniform(stmt.value)}
    if isinstance(stmt, base.WhileLoop):
        return view | {"condition": names.uniform(stmt.condition)}
    if isinstance(stmt, MmaSync):
        view |= _product(stmt, names)
    if isinstance(stmt, base.StoreRows):
        positions = _positions(stmt.dst, names.kernel.buffer(stmt.src), names)
        view |= {"positions": positions, "head_stride": f"args.{stmt.dst.buffer}.head_stride"}
    if isinstance(stmt, base.StoreElements | base.AddElements):
        return view | _elements(stmt, names)
    if isinstance(stmt, base.MapQuads):
        view |= _quads(stmt, names)
    if isinstance(stmt, sm90.Sm90Stmt):
        view |= _hopper(stmt, names)
    for item in fields(stmt):
        value = getattr(stmt, item.name)
        if isinstance(value, Window):
            view |= _window(value, item.name, names)
        elif (isinstance(value, str) and item.name in ("dst", "src", "acc", "a", "b")) or isinstance(value, Tile):
            view |= _on_chip(value, item.name, names)
        elif isinstance(value, Expr) and hasattr(stmt, "dst"):
            view |= _expression(value, stmt, names)
        elif item.name not in ("note", "body") and item.name not in view:
            view[item.name] = value
    return view


def _elements(stmt: base.StoreElements | base.AddElements, names: Names) -> Fields:
    """A register tile or row vector, and where its elements go in a global array."""
    src = names.kernel.buffer(stmt.src)
    view: Fields = {
        "target": f"args.{stmt.dst}",
        "target_type": names.kernel.buffer(stmt.dst).dtype.cuda,
        "index": ", ".join(names.element(part, src) for part in stmt.index),
        "src": stmt.src,
        "src_type": names.fragments[stmt.src],
        "src_is_tile": len(src.shape) == 2,
    }
    if isinstance(stmt, base.StoreElements):
        view["inside"] = names.element(stmt.inside, src)
    return view


QUAD = (("i", "j"), ("i", "j + 2"), ("i + 1", "j"), ("i + 1", "j + 2"))  # a thread's elements 8 rows and columns apart


def _quads(stmt: base.MapQuads, names: Names) -> Fields:
    """Where four elements get their words from, and what each is, with its own word."""
    dst = names.kernel.buffer(stmt.dst)
    random = next(node for node in walk(stmt.expr) if isinstance(node, Random))
    queries_are_rows = I in walk(random.q_idx)
    elements = []
    for number, (row, column) in enumerate(QUAD):
        word = number if queries_are_rows else number % 2 * 2 + number // 2
        expr = replaced(stmt.expr, random, Var(f"random.word[{word}]"))
        elements.append({"row": row, "column": column, "expr": names.element(expr, dst, column, row)})
    place = ", ".join(names.element(part, dst) for part in children(random))
    return {"place": place, "elements": elements}


def _product(stmt: MmaSync, names: Names) -> Fields:
    """The device function of a matrix product and its template arguments."""
    flag = {True: "true", False: "false"}
    acc, b = names.fragments[stmt.acc], camel(stmt.b.buffer)
    kind, suffix = "multiply", ""
    if names.kernel.buffer(stmt.b.buffer).dtype.bytes == 4:  # sums that go on from step to step are added otherwise
        kind, suffix = "add" if stmt.accumulate else "multiply", "_tf32"
    if isinstance(stmt.a, Tile):
        a = f"{camel(stmt.a.buffer)}, {flag[stmt.transpose_a]}"
        types = f"UNROLLED_DEPTH, {acc}, {a}, {b}, {flag[stmt.transpose_b]}"
        return {"product": f"{kind}_shared{suffix}", "types": types}
    return {"product": f"{kind}_packed{suffix}", "types": f"{acc}, {b}, {flag[stmt.transpose_b]}"}


def width(stmt: sm90.Wgmma, names: Names) -> int:
    """Columns that one warpgroup computes."""
    acc = names.kernel.buffer(stmt.acc)
    assert acc.warps is not None
    return names.sizes[acc.shape[1]] // acc.warps[1]


def instruction(stmt: sm90.Wgmma, names: Names) -> str:
    """The name of the device function that issues a product."""
    kind = "registers" if isinstance(stmt.a, str) else "shared_transposed" if stmt.transpose_a else "shared"
    return f"wgmma_64x{width(stmt, names)}x16_{kind}"


def _hopper(stmt: sm90.Sm90Stmt, names: Names) -> Fields:
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
        positions = _positions(stmt.dst, names.kernel.buffer(stmt.src.buffer), names)
        parts = [tile, positions or f"{tile}::ROWS", str(stmt.across)] if stmt.across else [tile, positions]
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


def _positions(window: Window, tile: Buffer, names: Names) -> str:
    """Rows of each head in a tile that several share; empty where its rows are those of one."""
    return names.uniform(Var(tile.shape[0]) // window.heads) if window.heads > 1 else ""


def _barrier(tile: Tile, kind: str, names: Names) -> str:
    name = f"{tile.buffer}_{kind}"
    if names.at_first_stage(tile):
        return name
    return f"{name} + {c_text(tile.stage, names.variable, parent=5)}"


def _window(window: Window, field: str, names: Names) -> Fields:
    buffer = names.kernel.buffer(window.buffer)
    spelled: Fields = {field: names.place(window)}
    if buffer.layout_of:
        warps = names.kernel.buffer(buffer.layout_of).warps
        spelled["across"] = str(warps[1] if warps else 1)
        shape = names.kernel.buffer(buffer.layout_of).shape
        return spelled | {"size": " * ".join(dim.upper() for dim in shape)}
    spelled |= {"rows": names.rows_left(window)}
    if len(names.kernel.buffer(window.buffer).shape) == 4:
        spelled |= {"row_stride": f"args.{window.buffer}.row_stride"}
        spelled |= {"true_cols": f"TRUE_{names.kernel.buffer(window.buffer).shape[3].upper()}"}
    return spelled


def _on_chip(place: Place, field: str, names: Names) -> Fields:
    buffer = names.kernel.buffer(place if isinstance(place, str) else place.buffer)
    in_registers = buffer.space is Space.REGISTER
    kind = names.fragments[buffer.name] if in_registers else camel(buffer.name)
    return {
        field: names.place(place),
        f"{field}_type": kind,
        f"{field}_length": buffer.shape[0].upper() if buffer.shape else "",
        f"{field}_is_register": in_registers,
        f"{field}_is_tile": len(buffer.shape) == 2,
        f"{field}_store": "store_panels" if names.in_panels(buffer) else "store_fragment",
    }


def _expression(value: Expr, stmt: Stmt, names: Names) -> Fields:
    dst = names.kernel.buffer(stmt.dst)  # type: ignore[attr-defined]
    return {
        "expr": names.element(value, dst),
        "even": names.element(value, dst, "2 * j"),
        "odd": names.element(value, dst, "2 * j + 1"),
    }
