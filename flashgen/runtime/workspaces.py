"""The workspaces of the backward: float32 arrays that its kernels hand to each other within one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flashgen.runtime.arguments import gapless

if TYPE_CHECKING:  # the compiler, which api.py imports when there is something to compile
    from flashgen.build import Stages
    from flashgen.runtime.program import Program


def shapes(made: Sequence[Program], batch: int, heads: int, rows: int, summed: int) -> dict[str, tuple[int, ...]]:
    """The shape of each that these programs take, by name, padded to the blocks and the head_dim of the second's plan.

    rows: of a head, seqlen_q or more. summed: those through which the sums of sinks go.
    lse_log2 and delta: a number a query. dq_workspace: a row a query, to which attention_backward adds dq.
    sink_sums: a number for each stretch of queries, of which attention_dsinks makes the gradient of the sinks.
    """
    sizes = made[1].stages.plan.sizes
    padded = (batch, heads, -(-rows // sizes["block_q"]) * sizes["block_q"])
    every = {"lse_log2": padded, "delta": padded, "dq_workspace": (*padded, sizes["head_dim"])}
    for program in made:
        if program.name == "attention_sink_sums":
            every["sink_sums"] = stretches(program.stages, batch, heads, summed)
    taken = {name for program in made for name in program.tensors}
    return {name: shape for name, shape in every.items() if name in taken}


def stretches(stages: Stages, batch: int, heads: int, rows: int) -> tuple[int, int, int]:
    """The shape of what attention_sink_sums writes: a number for each of its stretches of the sequences of a head."""
    return 1, heads, batch * -(-rows // stages.plan.sizes["block_kv"])


def strides(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """What a program is told of workspaces beside the address, as `Program.bind` takes it."""
    elements = {item.name for item in program.buffers if item.by_element}
    return {
        name: (*gapless(shape), *(max(size - 1, 0) for size in shape)) if name in elements else gapless(shape)[:-1]
        for name, shape in shapes.items()
    }
