"""Copies of keys that end before their tensor does, of batches."""

from __future__ import annotations

from flashgen.attention.lengths import batch_rows
from flashgen.ir.dtype import I32
from flashgen.ir.nodes import Kernel, Scalar
from flashgen.ir.visit import statements
from flashgen.machine.sm90 import TmaLoad
from flashgen.plan.plan import Plan


def number_rows(kernel: Kernel, plan: Plan) -> Kernel:
    """Where a load ends before its tensor does, rows are counted through all batches: a call says how many one has.

    A tensor map has five dimensions. Three say where such rows lie and where they end, and none is left for batches.
    Invariant: none; windows still name their batch.
    """
    loads = (stmt.src for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad))
    names = dict.fromkeys(
        item.buffer for item in loads if item.rows is not None and kernel.buffer(item.buffer).shape[0] == "batches"
    )
    return kernel.having(scalars=(*kernel.scalars, *(Scalar(batch_rows(name), I32) for name in names)))
