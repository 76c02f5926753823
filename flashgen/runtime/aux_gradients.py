"""The gradients of arrays that a score function reads: which kernels make one, and how their results become it.

An array is read at one index or several; each is a `Part` (attention/backward_aux.py) with a kernel of its own. Which
one follows from the index and from the shape of the array: an axis of one element is the same for all, so that a bias
of (1, 1, seqlen_q, seqlen_k) is summed over the batch and the heads within the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from flashgen import build
from flashgen.attention.aux_part import Part
from flashgen.calculus import derivative_by_load, loads_of
from flashgen.ir.dtype import F32, I64
from flashgen.ir.expr import Const, Expr, Var
from flashgen.plan.arch import Arch
from flashgen.runtime import workspaces
from flashgen.runtime.arguments import Problem, gapless
from flashgen.runtime.arrays import Library, Shape
from flashgen.runtime.auxiliary import LARGEST
from flashgen.runtime.call import Call
from flashgen.runtime.dropping import Drop
from flashgen.runtime.program import Program
from flashgen.spec import Array, Spec

if TYPE_CHECKING:
    from flashgen.runtime.program import Bound

ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
# Of a part's kernel, with the arrays that it alone has: `sums`, or `grad` like the array, and for integers `unit`.
Run = Callable[[Part, dict[str, Any]], None]
BITS, SMALLEST = 61, 2.0**-60


def _array(spec: Spec, name: str) -> Array:
    return next(item for item in spec.arrays if item.name == name)


def parts(spec: Spec, array: Array, shape: Shape, problem: Problem) -> tuple[Part, ...]:
    """The parts of the gradient of an array of this shape, without those that are zero everywhere."""
    assert spec.score is not None
    expr = spec.score.expr
    sizes = dict(zip(ARGUMENTS, (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k), strict=True))
    loads = [load for load in loads_of(expr, array.name) if derivative_by_load(expr, load) != Const(0.0)]
    found = []
    for load in loads:
        index = tuple(Const(0) if size == 1 else item for item, size in zip(load.index, shape, strict=True))
        plain = not spec.varlen and _plain(index, shape, sizes)
        part = Part(load, index, plain, packed=spec.varlen)
        if plain and part.by_pair and len(loads) == 1:
            part = replace(part, dtype=array.dtype)
        elif not plain and spec.deterministic:
            part = replace(part, dtype=I64)
        found.append(part)
    return tuple(found)


def _plain(index: tuple[Expr, ...], shape: Shape, sizes: dict[str, int]) -> bool:
    """True for arguments, each at most once and with all its elements in the array, and constants."""
    names = [item.name for item in index if isinstance(item, Var)]
    return len(set(names)) == len(names) and all(
        sizes.get(item.name, size + 1) <= size if isinstance(item, Var) else isinstance(item, Const)
        for item, size in zip(index, shape, strict=True)
    )


def gradient(library: Library, spec: Spec, name: str, like: Any, problem: Problem, run: Run) -> Any:
    """The gradient of an array, of its shape and type, from what its kernels give."""
    shape = tuple(like.shape)
    every = parts(spec, _array(spec, name), shape, problem) if 0 not in shape else ()
    if len(every) == 1 and every[0].plain and every[0].by_pair:
        grad = library.zeros(shape, like, like.dtype)
        run(every[0], {"grad": grad})
        return grad
    total = library.zeros(shape, like)
    for part in every:
        if part.target == "sums":
            sums = _sums(library, part, like, problem, run)
            _add_sums(library, total, part, sums)
        elif part.plain:
            stored = library.zeros(shape, like)
            run(part, {"grad": stored})
            total += stored
        elif part.ordered:
            total += _in_order(library, part, like, problem, run)
        else:
            run(part, {"grad": total})
    return library.cast(total, like)


def _sums(library: Library, part: Part, like: Any, problem: Problem, run: Run) -> Any:
    """What a part gives of each row of queries or keys: (batch, heads, row)."""
    rows = problem.seqlen_k if part.walk == "columns" else problem.seqlen_q
    sums = library.zeros((problem.batch, problem.heads, rows), like)
    run(part, {"sums": sums})
    return sums


def _in_order(library: Library, part: Part, like: Any, problem: Problem, run: Run) -> Any:
    """A gradient from additions of integers, whose order does not matter.

    One stands for 2^-61 of the sum of all |terms|, so that no element gets more than 63 bits. That sum is added up in a
    fixed order, and as it says how large all of them are, terms of its 2^-37th part still have the digits of float32.
    Where it is infinite or NaN, so is the gradient.
    """
    magnitudes = _sums(library, replace(part, dtype=F32, magnitude=True), like, problem, run)
    largest = magnitudes.sum().reshape(1) + SMALLEST  # of a gradient of zeros, for which any unit will do
    integers = library.zeros(tuple(like.shape), like, library.module().int64)
    run(part, {"grad": integers, "unit": 2.0**BITS / largest})
    return integers * (largest * 2.0**-BITS)


@cache
def program(spec: Spec, arch: Arch, part: Part) -> Program:
    """The compiled kernel of a part; one object in the process."""
    return Program(build.backward_aux(spec, arch, part))


def launching(call: Call, library: Library, arrays: dict[str, Any], drop: Drop | None) -> Run:
    """How the kernels of a call's parts run on the GPU, behind those of its backward."""

    def run(part: Part, own: dict[str, Any]) -> None:
        shape = tuple(own[part.target].shape)
        bound = call.parts.get((part, shape))
        if bound is None:
            bound = call.parts[part, shape] = _bound(call, part, shape)
        pointers = library.pointers(bound.arguments(arrays | own))
        bound.launch(pointers, library.stream(call.device), call.device, drop)

    return run


def _bound(call: Call, part: Part, shape: Shape) -> Bound:
    assert call.made is not None
    (spec, arch), (strides, scalars) = call.made, call.known
    last = (min(size - 1, LARGEST) for size in shape)
    own = {"sums": gapless(shape)[:2], "grad": (*gapless(shape), *last), "unit": (1, 0)}
    made = program(spec, arch, part)
    return made.bind({**strides, **workspaces.strides(made, call.workspaces), **own}, scalars)


def interpreting(
    spec: Spec, arch: Arch, call: Call, library: Library, hosted: dict[str, Any], drop: Drop | None
) -> Run:
    """How they run on the interpreter. hosted: what its backward has left."""
    from flashgen.runtime import interpret

    padding = build.backward(spec, arch)[1].plan.sizes["block_q"]

    def run(part: Part, own: dict[str, Any]) -> None:
        stages = build.backward_aux(spec, arch, part)
        interpret.part(stages, library, call, hosted, part.target, own, drop, padding)

    return run


def _add_sums(library: Library, total: Any, part: Part, sums: Any) -> None:
    """Sums (batch, heads, row), added up over what the index does not depend on, go to the elements of the index."""
    axes = ["b", "h", "kv_idx" if part.walk == "columns" else "q_idx"]
    names = [item.name for item in part.index if isinstance(item, Var)]
    common = tuple(place for place, name in enumerate(axes) if name not in names)
    kept = [name for name in axes if name in names]
    sizes = dict(zip(axes, sums.shape, strict=True))
    summed = sums.sum(axis=common) if common else sums
    if len(kept) > 1:
        places = tuple(names.index(name) for name in kept)
        summed = library.module().moveaxis(summed, tuple(range(len(kept))), places)
    total[tuple(_place(item, size, sizes) for item, size in zip(part.index, total.shape, strict=True))] += summed


def _place(item: Expr, size: int, sizes: dict[str, int]) -> int | slice:
    """What an index says of one axis."""
    if isinstance(item, Var):
        return slice(0, sizes[item.name])
    assert isinstance(item, Const)
    return min(int(item.value), size - 1)
