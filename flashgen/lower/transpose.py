"""Sums whose rows are the columns of a product of fewer rows than an instruction has."""

from __future__ import annotations

from flashgen.ir.nodes import Kernel
from flashgen.plan import transposed
from flashgen.plan.plan import Plan


def transpose_sums(kernel: Kernel, plan: Plan) -> Kernel:
    """Keep the sums that go to a global accumulator transposed, where the plan says so.

    Invariant: the accumulator has the order of that register tile in each kernel that touches it.
    """
    return transposed.as_planned(kernel, plan.candidate)
