"""Instruction selection that families share: what TILE statements on registers and stores of tiles become."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.dtype import OPERANDS
from flashgen.ir.expr import Cast
from flashgen.ir.nodes import (
    Copy,
    Fill,
    Kernel,
    Map,
    RowReduce,
    Scatter,
    ScatterAdd,
    Space,
    Stmt,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.visit import Body
from flashgen.machine import base


def select_shared(kernel: Kernel, stmt: Stmt) -> Stmt | Body:
    """The statement of machine/base.py, or the statement itself where the choice is the family's."""
    note = stmt.note
    match stmt:
        case Copy():
            return replace(_store(kernel, stmt), note=note)
        case Fill(dst=str() as fragment):
            return base.FillFragment(fragment, stmt.value, note=note)
        case Map(expr=Cast(x=value)) if kernel.buffer(stmt.dst).dtype.bytes == 2:
            return base.PackFragment(stmt.dst, value, note=note)
        case Map(expr=Cast(x=value)) if kernel.buffer(stmt.dst).dtype in OPERANDS:
            return base.MapFragment(stmt.dst, value, note=note)  # rounded, if at all, by the products
        case Map():
            return base.MapFragment(stmt.dst, stmt.expr, note=note)
        case RowReduce():
            return base.ReduceRows(stmt.dst, stmt.op, stmt.src, note=note), base.CombineLanes(stmt.dst, stmt.op)
        case Scatter():
            return base.StoreElements(stmt.dst, stmt.index, stmt.src, stmt.inside, note=note)
        case ScatterAdd():
            return base.AddElements(stmt.dst, stmt.index, stmt.src, note=note)
    return stmt


def _store(kernel: Kernel, stmt: Copy) -> Stmt:
    """The copy out of registers or of shared memory; a copy into the chip is left as it is."""
    if isinstance(stmt.src, Window):
        return stmt
    src = kernel.buffer(name_of(stmt.src))
    if isinstance(stmt.dst, Window):
        if src.space is Space.REGISTER:
            return base.StoreRows(stmt.dst, src.name)
        return base.StoreTile(stmt.dst, Tile(src.name))
    store = base.StoreTransposed if stmt.transpose else base.StoreFragment
    return store(Tile(name_of(stmt.dst)), src.name)
