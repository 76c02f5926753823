"""Visitors: the order of statements, rewriting, and substitution."""

from dataclasses import replace

import pytest
from ir_kernels import KERNELS, named

from flashgen.ir.expr import Const, I, J, Var, load, text
from flashgen.ir.nodes import Copy, For, If, Let, Map, Note, Tile, Window
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import inline_lets, rewrite, rewrite_kernel, statements, substitute_stmt


def test_statements_come_in_program_order():
    inner = If(Const(True), (Note(note="b"), Note(note="c")))
    body = (Note(note="a"), For("k", Const(0), Const(1), (inner,)), Note(note="d"))
    assert [stmt.note for stmt in statements(body) if isinstance(stmt, Note)] == list("abcd")
    assert sum(1 for _ in statements(body)) == 6


def test_rewrite_goes_inside_first_and_may_drop_or_multiply():
    body = (For("k", Const(0), Const(1), (Note(note="a"), Note(note="b"))), Note(note="a"))
    seen = []

    def change(stmt):
        seen.append(stmt_text(stmt) + stmt.note)
        return () if stmt.note == "a" else (stmt, stmt) if stmt.note == "b" else stmt

    result = rewrite(body, change)
    assert result == (replace(body[0], body=(Note(note="b"), Note(note="b"))),)
    assert seen == ["notea", "noteb", "for k in 0 .. 1:", "notea"]


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_rewriting_nothing_changes_nothing(kernel):
    assert rewrite_kernel(kernel, lambda stmt: stmt) == kernel
    assert all(substitute_stmt(stmt, {}) == stmt for stmt in kernel.body)


def test_substitution_reaches_every_expression():
    values = {"a": Const(5)}
    window = Window("g", (Var("a"), Const(0), Var("a") + 1))
    loop = For(
        "k", Var("a"), Var("a") * 2, (Copy(Tile("t", Var("a") % 2), window), Map("x", load("y", I, J) * Var("a")))
    )
    result = substitute_stmt(loop, values)
    assert stmt_text(result) == "for k in 5 .. 10:"
    assert [stmt_text(stmt) for stmt in result.body] == ["t@1 = copy g[5, 0, 6]", "x = map y[i, j] * 5"]


def test_inlined_lets_see_the_earlier_ones():
    body = (Let("a", Var("k") * 2), Note(), Let("b", Var("a") + 1), Let("a", Var("b")))
    assert {name: text(value) for name, value in inline_lets(body).items()} == {"a": "k * 2 + 1", "b": "k * 2 + 1"}
