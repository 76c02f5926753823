"""Numbers that a call brings for each of its batches or sequences: `seqused_k`, and what it shares with offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.attention.lengths import USED
from flashgen.runtime.arguments import Problem, check_device
from flashgen.runtime.arrays import Library


def check_integers(name: str, library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError unless the array of this name is a row of int32 without gaps, where q is."""
    array = arrays[name]
    if library.dtype_name(array) != "int32":
        raise ValueError(f"{name} is {library.dtype_name(array)} and must be int32; cast it")
    if len(array.shape) != 1:
        raise ValueError(f"{name} has {len(array.shape)} dimensions and needs 1, a number for each sequence")
    if array.shape[0] > 1 and library.strides(array)[0] != 1:
        raise ValueError(f"{name} is not contiguous; call .contiguous() on it")
    check_device(name, library, array, library.device(arrays["q"]))


def check(problem: Problem, library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError for a `seqused_k` that is not int32 (batch,), on the device of q."""
    if USED not in arrays:
        return
    check_integers(USED, library, arrays)
    count = arrays[USED].shape[0]
    if count != problem.batch:
        raise ValueError(f"{USED} has {count} elements for a batch of {problem.batch}; give one for each, (batch,)")


def check_values(library: Library, arrays: Mapping[str, Any], lengths: Any) -> None:
    """ValueError for more keys than there are, or fewer than none; lengths: how many there are, of each or of all.

    Of arrays on a GPU this waits for the device.
    """
    if USED not in arrays:
        return
    used = library.to_numpy(arrays[USED], "int32")
    if ((used < 0) | (used > lengths)).any():
        raise ValueError(f"{USED} must be from 0 to the keys that each sequence has; one is not")
