"""`check=True`: whether the functions of a call read within their arrays; they are evaluated for every element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flashgen.ir.expr import evaluate
from flashgen.plan.arch import for_capability, parse_arch
from flashgen.runner import program_of
from flashgen.runtime import auxiliary, launch
from flashgen.runtime.arguments import Problem, gapless, shown
from flashgen.runtime.arrays import Library
from flashgen.spec import Array, Spec

BLOCK_SIZE = 64


def check_reads(spec: Spec, problem: Problem, library: Library, arrays: Mapping[str, Any], on_gpu: bool) -> None:
    """ValueError where an element that is seen makes a mask or score function read outside of an array.

    It evaluates the functions once for every element and array, in O(blocks) memory, and waits for the device.
    """
    sizes = problem.scalars(1.0) | {"one": 1}
    for item in spec.arrays:
        if _is_outside(spec, item, library, arrays, sizes | dict(_sizes(item, arrays)), on_gpu):
            kind = item.name.partition("_")[0]
            shape = tuple(arrays[item.name].shape)
            raise ValueError(
                f"{kind}_mod reads outside of {shown(item.name)}, of shape {shape}; indexes must be from 0 up to the "
                "sizes, for every element that a query sees"
            )


def _sizes(item: Array, arrays: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    from flashgen.attention.reads import size

    for axis, count in enumerate(arrays[item.name].shape):
        yield size(item.name, axis), min(count, auxiliary.LARGEST)


def _is_outside(
    spec: Spec, item: Array, library: Library, arrays: Mapping[str, Any], sizes: dict[str, Any], on_gpu: bool
) -> bool:
    """True where one array is read outside of its shape."""
    from flashgen import build
    from flashgen.runtime import interpret

    device = library.device(arrays["q"])
    arch = for_capability(*launch.compute_capability(device)) if on_gpu and device is not None else parse_arch("sm_80")
    stages = build.reads(spec, item, arch, BLOCK_SIZE)
    count = stages.plan.sizes["tile_blocks"] * int(evaluate(stages.tile.axes[0].extent, {**stages.plan.sizes, **sizes}))
    if not on_gpu:
        return bool(interpret.reads(stages, library, dict(arrays), sizes, count).any())
    assert device is not None
    outside = library.zeros((1, sizes["heads"], count), arrays["q"])
    program = program_of(stages)
    read = [name for name in program.tensors if name != "outside"]
    strides = {"outside": gapless(outside.shape)[:-1]} | auxiliary.layouts(read, library, arrays)
    given = {**arrays, "outside": outside}
    bound = program.bind(strides, sizes)
    bound.launch(library.pointers(bound.arguments(given)), library.stream(device), device)
    return bool((outside > 0).any())
