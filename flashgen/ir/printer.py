"""The text form of a kernel: the dump, the golden file and what `flashgen show` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from flashgen.ir.expr import Expr, text
from flashgen.ir.nodes import (
    Accumulate,
    Buffer,
    Copy,
    Fill,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Map,
    Note,
    Place,
    RowReduce,
    Scatter,
    ScatterAdd,
    Stmt,
    Tile,
    Window,
)


def kernel_text(kernel: Kernel) -> str:
    """The whole kernel, a line a statement, ending in a newline."""
    return "\n".join(_lines(kernel)) + "\n"


def _lines(kernel: Kernel) -> Iterator[str]:
    yield f"kernel {kernel.name} ({kernel.level.name})"
    if kernel.note:
        yield f"  # {kernel.note}"
    yield "  scalars " + ", ".join(f"{scalar.name}: {scalar.dtype}" for scalar in kernel.scalars)
    for axis in kernel.axes:
        order = "  # longest first" if axis.longest_first else ""
        yield f"  grid {axis.name} in {text(axis.extent)}{order}"
    for buffer in kernel.buffers:
        yield f"  {_buffer(buffer)}"
    for stmt in kernel.body:
        yield from _stmt(stmt, 1)


def _buffer(buffer: Buffer) -> str:
    parts = [f"{buffer.space.value} {buffer.name}: {buffer.dtype}[{', '.join(buffer.shape)}]"]
    if buffer.stages > 1:
        parts.append(f"stages={buffer.stages}")
    if buffer.warps:
        start = f" from {buffer.first_warp}" if buffer.first_warp else ""
        copies = f" in {buffer.copies} copies" if buffer.copies > 1 else ""
        parts.append(f"warps={buffer.warps[0]}x{buffer.warps[1]}{start}{copies}")
    if buffer.by_column:
        parts.append("by column")
    if buffer.layout_of:
        parts.append(f"order={buffer.layout_of}")
    return " ".join(parts)


def _stmt(stmt: Stmt, depth: int) -> Iterator[str]:
    comment = f"  # {stmt.note}" if stmt.note else ""
    yield "  " * depth + stmt_text(stmt) + comment
    for inner in getattr(stmt, "body", ()):
        yield from _stmt(inner, depth + 1)


def place_text(place: Place) -> str:
    """A buffer, a window of a tensor or a stage of a shared tile."""
    if isinstance(place, Window):
        index = [text(part) for part in place.origin]
        if place.heads > 1:
            index[1] += f" .. {text(place.origin[1] + place.heads)}"
        rows = "" if place.rows is None else f" of {text(place.rows)} rows"
        return f"{place.buffer}[{', '.join(index)}]{rows}"
    if isinstance(place, Tile):
        stage = text(place.stage)
        return place.buffer if stage == "0" else f"{place.buffer}@{stage}"
    return place


def stmt_text(stmt: Stmt) -> str:
    """One statement without its note and its body."""
    match stmt:
        case For():
            return f"for {stmt.axis} in {text(stmt.start)} .. {text(stmt.stop)}:"
        case If():
            return f"if {text(stmt.condition)}:"
        case Let():
            return f"let {stmt.name} = {text(stmt.value)}"
        case Note():
            return "note"
        case Copy():
            return f"{place_text(stmt.dst)} = copy {place_text(stmt.src)}{'^T' * stmt.transpose}"
        case Fill():
            return f"{place_text(stmt.dst)} = fill {text(stmt.value)}"
        case Gemm():
            a, b = stmt.a + "^T" * stmt.transpose_a, stmt.b + "^T" * stmt.transpose_b
            part = f"[:, :{stmt.columns}]" if stmt.columns else ""
            return f"{stmt.acc} {'+=' if stmt.accumulate else '='} gemm {a}, {b}{part}"
        case Map():
            return f"{stmt.dst} = map {text(stmt.expr)}"
        case RowReduce():
            return f"{stmt.dst} = {stmt.op}({stmt.dst}, rows of {stmt.src})"
        case Accumulate():
            return f"{place_text(stmt.dst)} += atomically {stmt.src}"
        case Scatter():
            return f"{_element(stmt)} = {stmt.src} where {text(stmt.inside)}"
        case ScatterAdd():
            return f"{_element(stmt)} += atomically {stmt.src}"
        case _:
            return _machine_text(stmt)


def _element(stmt: Scatter | ScatterAdd) -> str:
    return f"{stmt.dst}[{', '.join(map(text, stmt.index))}]"


def _machine_text(stmt: Stmt) -> str:
    """A MACHINE statement: its name, then its fields in the order of their declaration."""
    parts = []
    for item in fields(stmt):
        value = getattr(stmt, item.name)
        if item.name in ("note", "body"):
            continue
        if isinstance(value, Expr):
            value = text(value)
        elif isinstance(value, Window | Tile):
            value = place_text(value)
        elif isinstance(value, tuple):
            value = f"({', '.join(text(part) if isinstance(part, Expr) else part or '_' for part in value)})"
        elif value in ("", None):
            continue
        parts.append(str(value) if item.name in ("dst", "acc") else f"{item.name}={value}")
    return f"{stmt.NAME} {', '.join(parts)}".rstrip()  # type: ignore[attr-defined]
