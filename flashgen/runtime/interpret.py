"""Running a call on the CPU interpreter: arrays to float32 NumPy in (batch, heads, seqlen, head_dim), and back.

Arrays of float64 stay that, and all is computed in float64: what the same loop nest gives without float32's rounding.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flashgen import lower
from flashgen.build import Stages
from flashgen.ir.dtype import I32
from flashgen.runtime import workspaces
from flashgen.runtime.arrays import Library
from flashgen.runtime.dropping import Drop

if TYPE_CHECKING:
    import numpy as np


BSHD_TO_BHSD = (0, 2, 1, 3)
PACKED = "thd"  # the layout of packed sequences: one batch for the kernels


def forward(
    stages: tuple[Stages, ...],
    library: Library,
    layout: str,
    call: Any,
    given: dict[str, Any],
    outputs: tuple,
    drop: Drop | None = None,
) -> None:
    """Fill o and lse."""
    import numpy as np

    real = _kept(library, given["q"])
    names = [item.name for item in stages[0].tile.buffers if item.name in ("q", "k", "v")]
    arrays = {name: _inward(library, layout, given[name]) for name in names} | _read(stages[:1], library, given)
    o, lse = outputs
    problem, width = call.problem, given["v"].shape[-1]
    arrays["o"] = np.full((problem.batch, problem.heads, problem.seqlen_q, width), np.nan, real)
    arrays["lse"] = np.full((problem.batch, problem.heads, problem.seqlen_q), np.nan, real)
    _run(stages[0], arrays, call, drop)
    _outward(library, layout, arrays["o"], o)
    lse[...] = library.from_numpy(arrays["lse"].reshape(call.lse_shape), lse)


def backward(
    stages: tuple[Stages, ...],
    library: Library,
    layout: str,
    call: Any,
    given: dict[str, Any],
    drop: Drop | None = None,
) -> dict[str, np.ndarray]:
    """Fill dq, dk and dv. Returns every array as the interpreter has it, workspaces included."""
    import numpy as np

    real = _kept(library, given["q"])
    arrays = _read(stages[1:], library, given)
    for name in given.keys() - arrays.keys() - {"dsinks"}:
        array, vector = given[name], name in ("lse", "dlse")
        arrays[name] = _vector(library, layout, array) if vector else _inward(library, layout, array)
    for name in ("dq", "dk", "dv"):
        arrays[name] = np.full_like(arrays[name], np.nan)
    sizes = stages[2].plan.sizes
    problem = call.problem
    rows = (problem.batch, problem.heads, problem.padded_rows(sizes["block_q"]))
    arrays |= {name: np.full(rows, np.nan, real) for name in ("lse_log2", "delta")}
    arrays["dq_workspace"] = np.full((*rows, sizes["head_dim"]), np.nan, real)
    for stage in stages[1:]:
        if stage.tile.name == "attention_sink_sums":
            summed = problem.summed_rows(sizes["block_q"])
            shape = workspaces.stretches(stage, problem.batch, problem.heads, summed)
            arrays["sink_sums"] = np.full(shape, np.nan, real)
            arrays["dsinks"] = np.full((1, 1, problem.heads), np.nan, real)
        _run(stage, arrays, call, drop, sizes["block_q"])
    for name in ("dq", "dk", "dv"):
        _outward(library, layout, arrays[name], given[name])
    if "dsinks" in given:
        given["dsinks"][...] = library.from_numpy(arrays["dsinks"][0, 0], given["dsinks"])
    return arrays


def part(
    stages: Stages,
    library: Library,
    call: Any,
    arrays: dict[str, np.ndarray],
    target: str,
    own: dict[str, Any],
    drop: Drop | None,
    padding: int,
) -> None:
    """Run one more kernel on what the backward has left, and on arrays of its own; it fills a target, or adds to it."""
    types = {name: "int64" if library.dtype_name(array) == "int64" else "float32" for name, array in own.items()}
    hosted = {name: library.to_numpy(array, types[name]).copy() for name, array in own.items()}
    _run(stages, arrays | hosted, call, drop, padding)
    own[target][...] = library.from_numpy(hosted[target], own[target])


def block_counts(stages: Stages, library: Library, given: dict[str, Any], visible: Any, sizes: dict[str, int]) -> None:
    """Fill `visible` (batch, heads, blocks of queries, blocks of keys)."""
    import numpy as np

    from flashgen.interp import tile

    batches, heads, rows, columns = visible.shape
    counts = np.full((batches, heads * rows, columns), np.nan, np.float32)
    arrays = {"visible": counts} | _read((stages,), library, given)
    tile.run(lower.tile(stages.tile), stages.plan.sizes, arrays, sizes | {"batches": batches})
    visible[...] = library.from_numpy(counts.reshape(visible.shape), visible, float32=True)


def reads(stages: Stages, library: Library, given: dict[str, Any], sizes: dict[str, Any], count: int) -> np.ndarray:
    """How many elements read outside of an array, for each head and block."""
    import numpy as np

    from flashgen.interp import tile

    outside = np.full((1, sizes["heads"], count), np.nan, np.float32)
    tile.run(lower.tile(stages.tile), stages.plan.sizes, {"outside": outside} | _read((stages,), library, given), sizes)
    return outside


def _run(stages: Stages, arrays: dict[str, np.ndarray], call: Any, drop: Drop | None, padding: int = 0) -> None:
    from flashgen.interp import common, tile

    kernel = lower.tile(stages.tile)
    used = {item.name for item in kernel.buffers}
    scalars = call.problem.scalars(call.scale) | {"padding": padding} | (drop.scalars() if drop else {})
    arrays = {name: array for name, array in arrays.items() if name in used}
    exact = any(array.dtype.name == "float64" for array in arrays.values())
    with common.in_float64() if exact else nullcontext():
        tile.run(kernel, stages.plan.sizes, arrays, scalars)


def _read(stages: tuple[Stages, ...], library: Library, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """What mask and score functions read, and lists of blocks."""
    items = dict.fromkeys(item for each in stages for item in each.tile.buffers if item.by_element)
    return {
        item.name: library.to_numpy(
            given[item.name], "int32" if item.dtype == I32 else _kept(library, given[item.name])
        )
        for item in items
        if item.name in given  # others are what one kernel leaves for another
    }


def _kept(library: Library, array: Any) -> str:
    """The type that an array is read in: float32, which holds those of 16 bits, or its own float64."""
    return "float64" if library.dtype_name(array) == "float64" else "float32"


def _inward(library: Library, layout: str, array: Any) -> np.ndarray:
    host = library.to_numpy(array, _kept(library, array))
    if layout == PACKED:
        return host.transpose(1, 0, 2)[None]
    return host.transpose(BSHD_TO_BHSD) if layout == "bshd" else host


def _vector(library: Library, layout: str, array: Any) -> np.ndarray:
    host = library.to_numpy(array, _kept(library, array))
    return host[None] if layout == PACKED else host


def _outward(library: Library, layout: str, array: np.ndarray, target: Any) -> None:
    laid_out = array[0].transpose(1, 0, 2) if layout == PACKED else array
    laid_out = array.transpose(BSHD_TO_BHSD) if layout == "bshd" else laid_out
    target[...] = library.from_numpy(laid_out, target)
