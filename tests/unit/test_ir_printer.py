"""The printer: a line a statement, and no field of a statement or declaration left out."""

from dataclasses import fields, is_dataclass, replace

import pytest
from ir_kernels import KERNELS, kernel_of, named

from flashgen.ir.dtype import F16
from flashgen.ir.expr import Const, Expr, I, J, Var, load
from flashgen.ir.nodes import (
    Accumulate,
    Copy,
    Fill,
    For,
    Gemm,
    If,
    Let,
    Level,
    Map,
    Note,
    RowReduce,
    Space,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.printer import kernel_text, place_text, stmt_text
from flashgen.ir.visit import statements
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import CopyTileAsync, WaitGroup


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_a_line_a_statement_and_every_name(kernel):
    printed = kernel_text(kernel)
    lines = printed.splitlines()
    assert printed.endswith("\n") and not printed.endswith("\n\n")
    header = 1 + bool(kernel.note) + 1 + len(kernel.axes) + len(kernel.buffers)
    assert len(lines) == header + sum(1 for _ in statements(kernel.body))
    assert all(line == line.rstrip() for line in lines)
    for buffer in kernel.buffers:
        assert sum(f" {buffer.name}: " in line for line in lines) == 1
    assert kernel_text(kernel) == printed


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Expr):
        return value + Var("other")
    if isinstance(value, Window):
        return replace(value, origin=(*value.origin[:-1], changed(value.origin[-1])))
    if isinstance(value, Tile):
        return replace(value, stage=changed(value.stage))
    if isinstance(value, tuple):
        return (*value, Note(note="more")) if value and is_dataclass(value[0]) else (*value, 7)
    return value + ("_other" if isinstance(value, str) else 1)


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_no_field_of_a_statement_is_left_out_of_the_text(kernel):
    printed = kernel_text(kernel)
    for at, stmt in enumerate(kernel.body):
        for stmt_field in fields(stmt):
            other = replace(stmt, **{stmt_field.name: changed(getattr(stmt, stmt_field.name))})
            body = (*kernel.body[:at], other, *kernel.body[at + 1 :])
            assert kernel_text(kernel.having(body=body)) != printed, f"{type(stmt).__name__}.{stmt_field.name}"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("buffers", {"name": "other"}),
        ("buffers", {"shape": ("r",)}),
        ("buffers", {"dtype": F16}),
        ("buffers", {"space": Space.SHARED}),
        ("buffers", {"stages": 2}),
        ("buffers", {"warps": (2, 1)}),
        ("buffers", {"layout_of": "y"}),
        ("scalars", {"name": "other"}),
        ("scalars", {"dtype": F16}),
        ("axes", {"name": "other"}),
        ("axes", {"extent": Const(1)}),
        ("axes", {"longest_first": True}),
    ],
)
def test_no_field_of_a_declaration_is_left_out_of_the_text(part, change):
    kernel = kernel_of()
    items = list(getattr(kernel, part))
    other = kernel.having(**{part: (replace(items[0], **change), *items[1:])})
    assert kernel_text(other) != kernel_text(kernel)


def test_name_level_and_note_are_printed():
    kernel = kernel_of()
    for change in ({"name": "other"}, {"level": Level.MACHINE}, {"note": "why"}):
        assert kernel_text(kernel.having(**change)) != kernel_text(kernel)


@pytest.mark.parametrize(
    ("stmt", "expected"),
    [
        (For("k", Const(0), Var("n"), ()), "for k in 0 .. n:"),
        (If(Var("a") < 3, ()), "if a < 3:"),
        (Let("a", Var("b") * 2), "let a = b * 2"),
        (Copy("t", Window("g", (Const(0), Var("h"), Var("s")))), "t = copy g[0, h, s]"),
        (Copy("t", Window("g", (Const(0), Var("h"), Var("s")), heads=4)), "t = copy g[0, h .. h + 4, s]"),
        (Copy(Tile("t", Var("k") % 2), "x"), "t@k % 2 = copy x"),
        (Fill("x", Const(0.0)), "x = fill 0.0"),
        (Gemm("x", "t", "u", transpose_a=True, accumulate=True), "x += gemm t^T, u"),
        (Gemm("x", "t", "u", transpose_b=True), "x = gemm t, u^T"),
        (Map("x", load("y", I, J) * 2), "x = map y[i, j] * 2"),
        (RowReduce("v", "max", "x"), "v = max(v, rows of x)"),
        (Accumulate(Window("g", (Const(0),)), "x"), "g[0] += atomically x"),
        (Barrier(), "barrier"),
        (WaitGroup(2), "wait_group pending=2"),
        (CopyTileAsync(Tile("t", Const(1)), Window("g", (Var("s"),))), "copy_tile_async t@1, src=g[s]"),
    ],
)
def test_text_of_each_statement(stmt, expected):
    assert stmt_text(stmt) == expected


def test_places():
    assert [place_text(place) for place in ("x", Tile("x"), Tile("x", Var("s")))] == ["x", "x", "x@s"]
    assert {name_of(place) for place in ("x", Tile("x"), Window("x", ()))} == {"x"}
