"""Walking and rewriting statement trees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace

from flashgen.ir.expr import Expr, Var, loads, substitute
from flashgen.ir.nodes import For, Kernel, Let, Stmt, Tile, Window

Body = tuple[Stmt, ...]


def statements(body: Body) -> Iterator[Stmt]:
    """Every statement, outer before inner, in program order."""
    for stmt in body:
        yield stmt
        yield from statements(getattr(stmt, "body", ()))


def rewrite(body: Body, change: Callable[[Stmt], Stmt | Body]) -> Body:
    """The body with `change` applied to each statement, innermost first; it returns one statement or several."""
    result: list[Stmt] = []
    for stmt in body:
        if getattr(stmt, "body", None) is not None:
            stmt = replace(stmt, body=rewrite(stmt.body, change))  # type: ignore[attr-defined, call-arg]
        changed = change(stmt)
        result += changed if isinstance(changed, tuple) else [changed]
    return tuple(result)


def rewrite_kernel(kernel: Kernel, change: Callable[[Stmt], Stmt | Body]) -> Kernel:
    """`rewrite` on the kernel's body."""
    return kernel.having(body=rewrite(kernel.body, change))


def substitute_stmt(stmt: Stmt, values: Mapping[str, Expr]) -> Stmt:
    """The statement with variables replaced in all of its expressions."""
    changes: dict[str, object] = {}
    for item in fields(stmt):
        value = getattr(stmt, item.name)
        if isinstance(value, Expr):
            changes[item.name] = substitute(value, values)
        elif isinstance(value, Window):
            origin = tuple(substitute(index, values) for index in value.origin)
            rows = None if value.rows is None else substitute(value.rows, values)
            changes[item.name] = replace(value, origin=origin, rows=rows)
        elif isinstance(value, Tile):
            changes[item.name] = Tile(value.buffer, substitute(value.stage, values))
        elif item.name == "body":
            changes[item.name] = tuple(substitute_stmt(inner, values) for inner in value)
        elif isinstance(value, tuple):
            changes[item.name] = tuple(substitute(part, values) if isinstance(part, Expr) else part for part in value)
    return replace(stmt, **changes)  # type: ignore[arg-type]


def heads_in_tile(kernel: Kernel) -> int:
    """Heads whose rows share a tile of queries."""
    windows = (item for stmt in statements(kernel.body) for item in (*stmt.reads(), *stmt.writes()))
    return max((item.heads for item in windows if isinstance(item, Window)), default=1)


def inline_lets(body: Body) -> dict[str, Expr]:
    """The Lets directly in a body, each with the earlier ones substituted into it; but for those that load."""
    values: dict[str, Expr] = {}
    for stmt in body:
        if isinstance(stmt, Let) and not loads(stmt.value):
            values[stmt.name] = substitute(stmt.value, values)
    return values


def lets_at(loop: For, step: Expr, prefix: str) -> tuple[Body, dict[str, Expr]]:
    """What statements of a loop need to be moved to where another step is at hand: Lets to go before them, for what is
    loaded, under names with a prefix; and what their variables become."""
    loading = [stmt for stmt in loop.body if isinstance(stmt, Let) and loads(stmt.value)]
    renamed = {stmt.name: Var(f"{prefix}_{stmt.name}") for stmt in loading}
    at = {loop.axis: step, **renamed}
    moved = tuple(Let(renamed[stmt.name].name, substitute(stmt.value, at)) for stmt in loading)
    return moved, {name: substitute(value, at) for name, value in inline_lets(loop.body).items()} | at
