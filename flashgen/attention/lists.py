"""Loops over listed blocks: what a mask shows of which blocks is data that a call brings, made by flashgen.block_mask.

A list belongs to a block of rows of the scores. Its first number says how many blocks are not skipped; one number for
each of these follows, in ascending order: twice the place of the block, and 1 more where it is partial, which is where
some of its elements are hidden or lie behind the end of a sequence. Blocks that are full are spared the mask.

`kv_list` (batch, head or block of heads, block of queries, entry): the place of a block of keys.
`q_list` (batch, key head, block of keys, entry): the place of a block of queries and, times MAX_BLOCKS, its head within
the group, so that the backward has one loop, of as many steps as there are blocks.
A mask that is the same for every batch or head has one list for all: the last of an axis is read beyond its end.
"""

from __future__ import annotations

from flashgen.ir.dtype import I32
from flashgen.ir.expr import Const, Expr, Var, binary, load
from flashgen.ir.nodes import Buffer, For, If, Let, Map, Space, Stmt

KEYS = Buffer("kv_list", ("any",) * 4, I32, Space.GLOBAL, by_element=True)
QUERIES = Buffer("q_list", ("any",) * 4, I32, Space.GLOBAL, by_element=True)
# By powers of two, these are shifts; / and % of signed numbers take more instructions and registers.
ENTRY = Var("entry")
PLACE, PARTIAL = binary("floor_div", ENTRY, 2), binary("floor_mod", ENTRY, 2)
WHERE_PARTIAL = PARTIAL.equals(1)
MAX_BLOCKS = 1 << 20  # of a sequence: a constant, as the computing warps of Hopper have no registers for a division
MAX_GROUP = 1 << 10  # heads of a group, so that an entry has 31 bits


def over_keys(head: Expr, step: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The step for each block of keys that is listed for a block of queries; head: the list's."""
    row = (Var("batch"), head, Var("q_block"))
    place = (Let("kv_start", PLACE * Var("block_kv")),)
    return _over("kv", KEYS.name, row, (*place, *step), "blocks of keys that are not skipped")


def over_queries(step: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """The step for each block of queries, of each head of the group, that is listed for a block of keys."""
    row = (Var("batch"), Var("head_kv"), Var("kv_block"))
    place = (
        Let("head", Var("head_kv") * Var("group") + binary("floor_div", ENTRY, 2 * MAX_BLOCKS)),
        Let("q_start", binary("floor_mod", PLACE, MAX_BLOCKS) * Var("block_q")),
    )
    return _over("q", QUERIES.name, row, (*place, *step), "blocks of queries, of all heads, that are not skipped")


def _over(name: str, buffer: str, row: tuple[Expr, ...], body: tuple[Stmt, ...], note: str) -> tuple[Stmt, ...]:
    step, steps = Var(f"{name}_step"), Var(f"{name}_steps")
    entry = Let(ENTRY.name, load(buffer, *row, step + 1))
    return (
        Let(steps.name, load(buffer, *row, Const(0)), note=note),
        For(step.name, Const(0), steps, (entry, *body)),
    )


def masked(expr: Expr) -> Stmt:
    """The mask of a step, where its block is partial."""
    return If(WHERE_PARTIAL, (Map("s", expr),), note="only blocks that are listed as partial are masked")
