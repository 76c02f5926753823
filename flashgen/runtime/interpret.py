"""Running a call on the CPU interpreter: arrays to float32 NumPy in (batch, heads, seqlen, head_dim), and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen import lower
from flashgen.build import Stages
from flashgen.ir.dtype import I32
from flashgen.runtime.arrays import Library

if TYPE_CHECKING:
    import numpy as np


BSHD_TO_BHSD = (0, 2, 1, 3)


def forward(
    stages: tuple[Stages, ...], library: Library, layout: str, call: Any, given: dict[str, Any], outputs: tuple
) -> None:
    """Fill o and lse."""
    import numpy as np

    arrays = {name: _inward(library, layout, given[name]) for name in "qkv"} | _read(stages[0], library, given)
    o, lse = outputs
    problem, width = call.problem, given["v"].shape[3]
    arrays["o"] = np.full((problem.batch, problem.heads, problem.seqlen_q, width), np.nan, np.float32)
    arrays["lse"] = np.full(call.lse_shape, np.nan, np.float32)
    _run(stages[0], arrays, call)
    _outward(library, layout, arrays["o"], o)
    lse[...] = library.from_numpy(arrays["lse"], lse, float32=True)


def backward(
    stages: tuple[Stages, ...], library: Library, layout: str, call: Any, given: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Fill dq, dk and dv. Returns every array as the interpreter has it, workspaces included."""
    import numpy as np

    arrays = _read(stages[0], library, given)
    for name in given.keys() - arrays.keys():
        array, vector = given[name], name in ("lse", "dlse")
        arrays[name] = library.to_numpy(array) if vector else _inward(library, layout, array)
    for name in ("dq", "dk", "dv"):
        arrays[name] = np.full_like(arrays[name], np.nan)
    sizes = stages[2].plan.sizes
    problem = call.problem
    padded = -(-problem.seqlen_q // sizes["block_q"]) * sizes["block_q"]
    rows = (problem.batch, problem.heads, padded)
    arrays |= {name: np.full(rows, np.nan, np.float32) for name in ("lse_log2", "delta")}
    arrays["dq_workspace"] = np.full((*rows, sizes["head_dim"]), np.nan, np.float32)
    for stage in stages[1:]:
        _run(stage, arrays, call)
    for name in ("dq", "dk", "dv"):
        _outward(library, layout, arrays[name], given[name])
    return arrays


def part(stages: Stages, library: Library, call: Any, arrays: dict[str, np.ndarray], name: str, target: Any) -> None:
    """Run one more kernel on what the backward has left; it fills a target, or adds to it."""
    hosted = library.to_numpy(target).copy()
    _run(stages, arrays | {name: hosted}, call)
    target[...] = library.from_numpy(hosted, target)


def _run(stages: Stages, arrays: dict[str, np.ndarray], call: Any) -> None:
    from flashgen.interp import tile

    kernel = lower.tile(stages.tile)
    used = {item.name for item in kernel.buffers}
    scalars = call.problem.scalars(call.scale)
    tile.run(kernel, stages.plan.sizes, {name: array for name, array in arrays.items() if name in used}, scalars)


def _read(stages: Stages, library: Library, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """What mask and score functions read."""
    items = [item for item in stages.tile.buffers if item.by_element]
    return {
        item.name: library.to_numpy(given[item.name], "int32" if item.dtype == I32 else "float32") for item in items
    }


def _inward(library: Library, layout: str, array: Any) -> np.ndarray:
    host = library.to_numpy(array)
    return host.transpose(BSHD_TO_BHSD) if layout == "bshd" else host


def _outward(library: Library, layout: str, array: np.ndarray, target: Any) -> None:
    laid_out = array.transpose(BSHD_TO_BHSD) if layout == "bshd" else array
    target[...] = library.from_numpy(laid_out, target)
