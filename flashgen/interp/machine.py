"""Runs a MACHINE kernel on the CPU, warp by warp, and reports what the hardware would leave undefined.

Every access to shared memory is checked (interp/shared_memory), row results are kept per lane (interp/fragments), warps
run in an order drawn from a seed (interp/warps). Values must equal those of the tile interpreter up to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np

from flashgen.interp import machine_base, machine_sm80, machine_sm90
from flashgen.interp.common import Uniform, Value, evaluate, number
from flashgen.interp.trace import Trace
from flashgen.interp.warps import Block, Meaning
from flashgen.ir.nodes import Kernel, Level
from flashgen.plan.plan import Plan

FAMILIES: dict[str, dict[type, Meaning]] = {
    "sm80": machine_base.RUN | machine_sm80.RUN,
    "sm90": machine_sm90.RUN,
}


def run(
    kernel: Kernel,
    plan: Plan,
    arrays: Mapping[str, np.ndarray],
    scalars: Mapping[str, int | float],
    seed: int = 0,
) -> Trace:
    """Executes the whole grid, one block after another; outputs among `arrays` are written in place.

    Raises Hazard where a value is read or overwritten without the hardware's guarantee, Deadlock where warps wait for
    what never comes.
    """
    assert kernel.level is Level.MACHINE, kernel.name
    values: dict[str, Value] = {"multiprocessors": plan.arch.multiprocessors, **plan.sizes}
    values |= {name: number(value) for name, value in scalars.items()}
    extents = [range(int(evaluate(axis.extent, Uniform(values)))) for axis in kernel.axes]
    trace = Trace()
    with np.errstate(all="ignore"):
        for position in product(*extents):
            names = {**values, **dict(zip((axis.name for axis in kernel.axes), position, strict=True))}
            Block(kernel, plan, arrays, names, FAMILIES[plan.arch.family], trace).run((seed, position))
            trace.blocks += 1
    return trace
