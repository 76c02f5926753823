"""Operands that cannot stay in registers."""

from __future__ import annotations

from flashgen.ir.nodes import Kernel
from flashgen.plan import operands
from flashgen.plan.plan import Plan


def through_shared(kernel: Kernel, plan: Plan) -> Kernel:
    """Route a register operand through shared memory where the accumulator is divided among the warps otherwise.

    Invariant: every register operand left is divided like the rows of its accumulator, one warp across the columns.
    """
    return operands.through_shared(kernel, plan.layouts)
