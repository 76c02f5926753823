"""View models: what a macro is handed for one statement, with every name already spelled."""

from __future__ import annotations

from dataclasses import fields

from flashgen.emit.names import Fields, Names, camel, positions
from flashgen.emit.view_sm90 import hopper
from flashgen.ir.expr import PRECEDENCE, Expr, I, Random, Var, children, replaced, walk
from flashgen.ir.nodes import For, If, Let, Place, Space, Stmt, Tile, Window
from flashgen.machine import base, sm90
from flashgen.machine.sm80 import MmaSync


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
        of_each = positions(stmt.dst, names.kernel.buffer(stmt.src), names)
        view |= {"positions": of_each, "head_stride": f"args.{stmt.dst.buffer}.head_stride"}
    if isinstance(stmt, base.StoreElements | base.AddElements):
        return view | _elements(stmt, names)
    if isinstance(stmt, base.MapQuads):
        view |= _quads(stmt, names)
    if isinstance(stmt, sm90.Sm90Stmt):
        view |= hopper(stmt, names)
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
