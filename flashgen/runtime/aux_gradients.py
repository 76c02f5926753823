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
from flashgen.attention.backward_aux import Part
from flashgen.calculus import derivative_by_load, loads_of
from flashgen.ir.expr import Const, Expr, Var, text
from flashgen.plan.arch import Arch
from flashgen.runtime import workspaces
from flashgen.runtime.arguments import Problem, gapless, shown
from flashgen.runtime.arrays import Library, Shape
from flashgen.runtime.auxiliary import LARGEST
from flashgen.runtime.call import Call
from flashgen.runtime.program import Program
from flashgen.spec import Array, Spec

if TYPE_CHECKING:
    from flashgen.runtime.program import Bound

ARGUMENTS = ("b", "h", "q_idx", "kv_idx")
Run = Callable[[Part, Any], None]  # of a part's kernel, with what it writes: `sums`, or `grad` like the array


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
        plain = _plain(index, shape, sizes)
        part = Part(load, index, plain)
        found.append(replace(part, dtype=array.dtype) if plain and part.by_pair and len(loads) == 1 else part)
    return tuple(found)


def _plain(index: tuple[Expr, ...], shape: Shape, sizes: dict[str, int]) -> bool:
    """True for arguments, each at most once and with all its elements in the array, and constants."""
    names = [item.name for item in index if isinstance(item, Var)]
    return len(set(names)) == len(names) and all(
        sizes.get(item.name, size + 1) <= size if isinstance(item, Var) else isinstance(item, Const)
        for item, size in zip(index, shape, strict=True)
    )


def check(spec: Spec, name: str, shape: Shape, problem: Problem) -> None:
    """ValueError for a gradient that there is not: one that would not repeat, where the spec asks for that."""
    if spec.dropout or spec.varlen:
        what = "dropout" if spec.dropout else "packed sequences"
        raise ValueError(f"{shown(name)} has no gradient beside {what}; detach it, or leave {what} out")
    array = _array(spec, name)
    for part in parts(spec, array, shape, problem) if spec.deterministic else ():
        if not part.plain:
            raise ValueError(
                f"the gradient of {shown(array.name)} is added up without order where it is read as {text(part.load)}, "
                f"of shape {tuple(shape)}: it would not repeat bit for bit; use deterministic=False or detach it"
            )


def gradient(library: Library, spec: Spec, name: str, like: Any, problem: Problem, run: Run) -> Any:
    """The gradient of an array, of its shape and type, from what its kernels give."""
    shape = tuple(like.shape)
    every = parts(spec, _array(spec, name), shape, problem) if 0 not in shape else ()
    if len(every) == 1 and every[0].plain and every[0].by_pair:
        grad = library.zeros(shape, like, float32=False)
        run(every[0], grad)
        return grad
    total = library.zeros(shape, like)
    for part in every:
        if part.target == "sums":
            rows = problem.seqlen_k if part.walk == "columns" else problem.seqlen_q
            sums = library.empty((problem.batch, problem.heads, rows), like, float32=True)
            run(part, sums)
            _add_sums(library, total, part, sums)
        elif part.plain:
            stored = library.zeros(shape, like)
            run(part, stored)
            total += stored
        else:
            run(part, total)
    return library.cast(total, like)


@cache
def program(spec: Spec, arch: Arch, part: Part) -> Program:
    """The compiled kernel of a part; one object in the process."""
    return Program(build.backward_aux(spec, arch, part))


def launching(call: Call, library: Library, arrays: dict[str, Any]) -> Run:
    """How the kernels of a call's parts run on the GPU, behind those of its backward."""

    def run(part: Part, target: Any) -> None:
        shape = tuple(target.shape)
        bound = call.parts.get((part, shape))
        if bound is None:
            bound = call.parts[part, shape] = _bound(call, part, shape)
        given = arrays | {part.target: target}
        pointers = library.pointers([given[name] for name in bound.program.tensors])
        bound.launch(pointers, library.stream(call.device), call.device)

    return run


def _bound(call: Call, part: Part, shape: Shape) -> Bound:
    assert call.made is not None
    (spec, arch), (strides, scalars) = call.made, call.known
    last = (min(size - 1, LARGEST) for size in shape)
    own = {"sums": gapless(shape)[:2], "grad": (*gapless(shape), *last)}
    made = program(spec, arch, part)
    known = {**strides, **workspaces.strides(made, call.workspaces), part.target: own[part.target]}
    return made.bind(known, scalars)


def interpreting(spec: Spec, arch: Arch, call: Call, library: Library, hosted: dict[str, Any]) -> Run:
    """How they run on the interpreter. hosted: what its backward has left."""
    from flashgen.runtime import interpret

    def run(part: Part, target: Any) -> None:
        interpret.part(build.backward_aux(spec, arch, part), library, call, hosted, part.target, target)

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
