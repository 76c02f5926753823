"""Wide values: an output of more columns than the registers of the warps that own its rows can hold.

Several warps (warpgroups on sm90) then own the same rows of queries, and divide the columns of O. Each computes the
scores of its rows itself, so that P is in its registers as the product with its columns of V takes it. That multiplies
Q by K once for each of them, and nothing goes from warp to warp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flashgen.ir.nodes import Kernel

# Columns of O up to which the warps that own its rows hold them all: 128 registers a thread for 64 rows.
MOST_COLUMNS = 256
OUTPUT = ("o_acc", "o_out")  # the register tiles with the columns of V
WARPGROUPS = 2  # that divide O on sm90
UNIT = 64  # columns of a part are a multiple of this: panels of sm90, and two matrix instructions of 4 warps on sm80


def is_wide(sizes: Mapping[str, int]) -> bool:
    """True where a head dim is wider than the backward has kernels for, so that tiles are narrow in the other way."""
    return max(sizes["head_dim"], sizes["head_dim_v"]) > MOST_COLUMNS


def shares_values(kernel: Kernel) -> bool:
    """True for a forward whose values are columns of the keys, and so in the keys' tile."""
    names = {item.name for item in kernel.buffers}
    return "k_tile" in names and "v_tile" not in names


def divides_output(kernel: Kernel, sizes: Mapping[str, int]) -> bool:
    """True for a kernel whose output is divided by columns."""
    return any(item.name in OUTPUT for item in kernel.buffers) and sizes["head_dim_v"] > MOST_COLUMNS


def padded(size: int, family: str) -> int:
    """Columns of V that are wider than one part, as whole parts."""
    unit = WARPGROUPS * UNIT if family == "sm90" else UNIT
    return -(-size // unit) * unit


def output_layouts(tiles: Iterable[str], down: int, across: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Warps along the rows and columns of each tile, where `across` have the same rows."""
    return tuple((name, (down, across if name in OUTPUT else 1)) for name in tiles)
