"""Whether arrays that score functions read by [.., q_idx, kv_idx] lie so that TMA copies tiles of them.

A kernel is compiled without a look at strides, so the call decides which one it takes (`Spec.tiled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.attention import tiles
from flashgen.runtime.arguments import Problem, shown
from flashgen.runtime.arrays import Library
from flashgen.runtime.tensormap import Box, TensorMap
from flashgen.spec import Spec

ROW_ELEMENTS = 8  # of 16 bits: TMA takes addresses and strides of whole 16 bytes
LIMIT = 2**39  # elements between the places of an axis: 2^40 bytes
Layout = tuple[int, ...]  # of an array: the stride of each axis, then the last index of each


def any_fit(spec: Spec) -> bool:
    """True for a spec with such arrays."""
    return bool(tiles.fit(spec))


def unfit(spec: Spec, problem: Problem, library: Library, arrays: Mapping[str, Any]) -> str:
    """Why tiles cannot be copied of the first array of which they cannot, or an empty string."""
    sizes = (problem.seqlen_q, problem.seqlen_k)
    found = ((item, _unfit(library, arrays[item.name], sizes)) for item in tiles.fit(spec))
    return next((f"{shown(item.name)} {reason}" for item, reason in found if reason), "")


def _unfit(library: Library, array: Any, sizes: tuple[int, int]) -> str:
    *outer, row, column = zip(array.shape, library.strides(array), strict=True)
    if row[0] < sizes[0] or column[0] < sizes[1]:
        return f"has {row[0]} x {column[0]} elements for {sizes[0]} queries and {sizes[1]} keys"
    if column[1] != 1 and column[0] > 1:
        return "is not contiguous along its last axis"
    if row[0] > 1 and not _is_step(row[1]):
        return f"has rows {row[1]} elements apart, which is no multiple of 16 bytes"
    if any(size > 1 and step and not _is_step(step) for size, step in outer):
        return "has matrices that are no multiple of 16 bytes apart"
    return "" if library.pointer(array) % 16 == 0 else "is not 16-byte aligned"


def _is_step(stride: int) -> bool:
    return 0 < stride < LIMIT and stride % ROW_ELEMENTS == 0


def scalars(spec: Spec, layouts: Mapping[str, Layout]) -> dict[str, int]:
    """What kernels that copy tiles are told beside tensor maps; an axis with a stride of zero has one place."""
    found = {}
    for item in tiles.fit(spec):
        for axis, (stride, last) in enumerate(_outer(layouts[item.name])):
            found[tiles.last(item, axis)] = last if stride else 0
    return found


def _outer(layout: Layout) -> list[tuple[int, int]]:
    """(stride, last index) of the axes before rows and columns."""
    rank = len(layout) // 2
    return list(zip(layout[: rank - 2], layout[rank : 2 * rank - 2], strict=True))


def tensor_map(dtype: str, layout: Layout, box: Box) -> TensorMap:
    """How TMA sees an array: (column, row, axis before, axis before that), with one place where there is no axis."""
    rank = len(layout) // 2
    outer = [(0, 0)] * (tiles.OUTER - (rank - 2)) + _outer(layout)
    sizes = [last + 1 if stride else 1 for stride, last in reversed(outer)]
    rows, columns = layout[-2] + 1, layout[-1] + 1
    strides = (layout[rank - 2], *(stride for stride, _ in reversed(outer)))
    return TensorMap(dtype, (columns, rows, *sizes), strides, box)
