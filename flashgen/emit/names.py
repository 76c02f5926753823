"""How the names of one kernel are spelled in its CUDA: dimensions, places, elements of registers."""

from __future__ import annotations

from functools import cached_property

from flashgen.emit.cexpr import Fused, c_text, no_element
from flashgen.ir.dtype import OPERANDS
from flashgen.ir.expr import Binary, Cast, Compare, Const, Expr, I, J, Load, Unary, Var, rebuild, walk
from flashgen.ir.nodes import Buffer, Kernel, Place, Space, Tile, Window
from flashgen.ir.visit import statements
from flashgen.machine import sm90
from flashgen.machine.sm90_facts import operands
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

    So for a column that is added to a row, or taken from it, as floats, and for a multiple of one in a sum.
    """
    expr = rebuild(expr, _by_offset)
    match expr:
        case Compare(op, x, y) if x == J:
            return Compare(op, COL_OFFSET, y - LANE_COL)
        case Binary("+" | "-" as op, Cast(dtype, row), Cast(_, column)) if column == J:
            return Binary(op, Cast(dtype, Binary(op, row, LANE_COL)), Cast(dtype, COL_OFFSET))
        case Binary("+", Binary("*", Cast(dtype, column), factor), rest) if column == J:
            return Fused(Cast(dtype, COL_OFFSET), factor, Cast(dtype, LANE_COL) * factor + rest)
        case Binary("-", rest, Binary("*", Cast(dtype, column), factor)) if column == J:
            return Fused(Cast(dtype, COL_OFFSET), Unary("neg", factor), rest - Cast(dtype, LANE_COL) * factor)
    return expr


def width(stmt: sm90.Wgmma, names: Names) -> int:
    """Columns that one warpgroup computes."""
    acc = names.kernel.buffer(stmt.acc)
    assert acc.warps is not None
    return names.sizes[acc.shape[1]] // acc.warps[1]


def positions(window: Window, tile: Buffer, names: Names) -> str:
    """Rows of each head in a tile that several share; empty where its rows are those of one."""
    return names.uniform(Var(tile.shape[0]) // window.heads) if window.heads > 1 else ""
