"""Kernels of a problem planned by hand, lowered, and run by the machine interpreter beside the tile interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_cases import UNITS, Problem

from flashgen import lower
from flashgen.interp import machine, tile
from flashgen.ir.nodes import Kernel, Space
from flashgen.plan import planner
from flashgen.plan.arch import TOY, Arch, with_shared_memory
from flashgen.plan.candidates import balanced
from flashgen.plan.plan import Candidate, Plan

# The backward holds six tiles: on the toy chip it needs more room than the forward.
ROOMY = with_shared_memory(TOY, 32 * 1024)

OUTPUTS = {
    "attention_forward": ("o", "lse"),
    "attention_delta": ("delta", "lse_log2", "dq_workspace"),
    "attention_backward": ("dk", "dv", "dq_workspace"),
    "attention_convert_dq": ("dq",),
    "attention_backward_dq": ("dq",),
    "attention_sink_sums": ("sink_sums",),
    "attention_dsinks": ("dsinks",),
}


@dataclass(frozen=True)
class Choice:
    """What a planner chooses: warps, instruction heights a warp, columns of a step, stages, warps across columns."""

    warps: int = 2
    height: int = 1
    columns: int = 16
    stages: tuple[int, int] = (1, 1)
    split: int = 1

    def candidate(self, kernel: Kernel, arch: Arch, sizes: dict[str, int]) -> Candidate:
        tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
        rows = self.warps * self.height * arch.mma[0]
        first, second = self.stages
        if kernel.name != "attention_backward":
            return Candidate(
                (("block_q", rows), ("block_kv", self.columns)),
                self.warps,
                (("k_tile", first), ("v_tile", second)),
                tuple((name, (self.warps, 1)) for name in tiles),
            )
        layouts = dict.fromkeys(tiles, (self.warps // self.split, self.split))
        if "dq_acc" in layouts:
            layouts["dq_acc"] = balanced(self.warps, self.columns, sizes["head_dim"], arch)
        stages = {"q_tile": first, "lse_tile": first, "dout_tile": second, "delta_tile": second}
        blocks = (("block_kv", rows // self.split), ("block_q", self.columns))
        return Candidate(blocks, self.warps, tuple(stages.items()), tuple(layouts.items()))


def plan(kernel: Kernel, problem: Problem, choice: Choice, arch: Arch = ROOMY) -> Plan | None:
    """The plan of a choice, or None where it does not fit."""
    sizes = planner.head_dims(problem.spec, arch)
    candidate = choice.candidate(kernel, arch, sizes)
    if planner.judge(kernel, arch, sizes, candidate).rejection:
        return None
    return planner.make(kernel, problem.spec, arch, candidate)


def plans(problem: Problem, choice: Choice, arch: Arch = ROOMY) -> dict[str, Plan] | None:
    """Plans by kernel name; delta and convert_dq take the blocks of the backward, as the planner has it."""
    kernels = {kernel.name: kernel for kernel in problem.kernels()}
    found = {name: plan(kernel, problem, choice, arch) for name, kernel in kernels.items() if _leads(name)}
    if None in found.values():
        return None
    for name, kernel in kernels.items():
        if name not in found:
            found[name] = planner.plan_like(kernel, problem.spec, arch, found["attention_backward"])
    return {name: found[name] for name in kernels}  # type: ignore[misc]


def _leads(name: str) -> bool:
    return name not in ("attention_delta", "attention_convert_dq")


def compare(problem: Problem, chosen: dict[str, Plan], seeds=(0,)) -> dict[str, machine.Trace]:
    """Each kernel by both interpreters on the same inputs; returns the traces."""
    sizes = dict(chosen["attention_backward"].sizes)
    arrays = {**problem.arrays, **problem.outputs(problem.dims() | sizes)}
    traces = {}
    for kernel in problem.kernels():
        its_plan = chosen[kernel.name]
        lowered = lower.run(kernel, its_plan)
        before = copies(arrays)
        counter = tile.Counter()
        tile.run(lower.tile(kernel), its_plan.sizes, arrays, problem.scalars, counter)
        for seed in seeds:
            trace = machine_equals_tile(lowered, its_plan, problem, before, arrays, seed)
            traces[kernel.name] = trace
            assert trace.flops == counter.flops, kernel.name
            assert trace.global_bytes_read == counter.global_bytes_read, kernel.name
            assert trace.global_bytes_written >= counter.global_bytes_written, kernel.name
    return traces


def copies(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def machine_equals_tile(lowered, its_plan, problem, before, after, seed=0, slack=1) -> machine.Trace:
    """One lowered kernel on the arrays as they were before it, against what the tile interpreter made of them."""
    arrays = copies(before)
    trace = machine.run(lowered, its_plan, arrays, problem.scalars, seed)
    for name in OUTPUTS[lowered.name]:
        if name in after:
            assert_same(f"{lowered.name}: {name}", arrays[name], after[name], problem.spec.dtype, slack)
    return trace


def assert_same(what, x, expected, dtype, slack=1):
    """Equal but for the order of sums, which may move a value to the neighbouring one of the storage type.

    slack: more where operands, too, are rounded at other places.
    """
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(x[~finite], expected[~finite], err_msg=what)
    bound = slack * UNITS[dtype.name] * (0.1 + np.abs(expected[finite]).max(initial=0.0))
    worst = np.abs(x[finite] - expected[finite]).max(initial=0.0)
    assert worst <= bound, f"{what}: {worst} > {bound}"
