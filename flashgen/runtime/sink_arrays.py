"""The sinks of a call: checked and described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashgen.ir.dtype import F32, DType
from flashgen.runtime.arguments import Problem, check_device
from flashgen.runtime.arrays import Library, library_of
from flashgen.spec import Spec


def dtype(spec: Spec, sinks: Any) -> DType | None:
    """Their type, float32 or the storage type, or None without; ValueError where they are missing, or not asked for."""
    if spec.sinks is None:
        if sinks is None:
            return None
        raise ValueError("sinks are given but this kernel was compiled without them; compile(..., sinks=True)")
    if sinks is None:
        raise ValueError("this kernel takes sinks, a number for each head; give kernel(q, k, v, sinks=t)")
    found = library_of(sinks, "sinks").dtype_name(sinks)
    for known in (F32, spec.dtype):
        if known.in_memory == found:
            return known
    raise ValueError(
        f"sinks is {found} but this kernel takes float32 or {spec.dtype.in_memory}; cast it to one of them"
    )


def check(problem: Problem, library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError for sinks of another shape than (heads,), or on another device than q."""
    if "sinks" not in arrays:
        return
    sinks = arrays["sinks"]
    if tuple(sinks.shape) != (problem.heads,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; give it one number for each head of q, ({problem.heads},)"
        )
    check_device("sinks", library, sinks, library.device(arrays["q"]))
