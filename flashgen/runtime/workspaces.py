"""The workspaces of the backward: float32 arrays that its kernels hand to each other within one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the compiler, which api.py imports when there is something to compile
    from flashgen.runtime.program import Program


def shapes(made: Sequence[Program], batch: int, heads: int, seqlen_q: int) -> dict[str, tuple[int, ...]]:
    """The shape of each that these programs take, by name, padded to the blocks and the head_dim of the second's plan.

    lse_log2 and delta: a number a query. dq_workspace: a row a query, to which attention_backward adds dq.
    """
    sizes = made[1].stages.plan.sizes
    rows = (batch, heads, -(-seqlen_q // sizes["block_q"]) * sizes["block_q"])
    every = {"lse_log2": rows, "delta": rows, "dq_workspace": (*rows, sizes["head_dim"])}
    taken = {name for program in made for name in program.tensors}
    return {name: shape for name, shape in every.items() if name in taken}
