"""The arrays that mask and score functions read: `mask_aux` and `score_aux` of a call, checked and described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashgen.ir.dtype import DType
from flashgen.ir.expr import variables
from flashgen.runtime.arguments import Problem, check_device, shown
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.launch import MAX_BLOCKS
from flashgen.spec import Spec
from flashgen.trace import DTYPES, DTypes

LARGEST = 2**31 - 1  # an index has 32 bits
Types = tuple[DTypes | None, DTypes | None]  # of mask_aux and of score_aux
Retrace = Callable[[DTypes | None, DTypes | None], Spec]


def dtypes(argument: str, arrays: Any) -> DTypes | None:
    """The types of the arrays of `mask_aux` or `score_aux`; None where there are none."""
    if arrays is None:
        return None
    return tuple(_dtype(f"{argument}[{place}]", array) for place, array in enumerate(arrays))


def _dtype(name: str, array: Any) -> DType:
    found = library_of(array, name).dtype_name(array)
    if found not in DTYPES:
        instead = "int32" if "int" in found or found == "bool" else "float32"
        raise ValueError(f"{name} is {found}; cast it to {instead}, or give one of {', '.join(DTYPES)}")
    return DTYPES[found]


def named(spec: Spec, mask_aux: Any, score_aux: Any) -> dict[str, Any]:
    """The arrays by their names in the kernels; ValueError unless there are as many as the functions take."""
    found: dict[str, Any] = {}
    for kind, function, aux in (("mask", spec.mask, mask_aux), ("score", spec.score, score_aux)):
        if aux is not None and not isinstance(aux, tuple | list):
            what = type(aux).__name__
            raise TypeError(f"{kind}_aux is of type {what}; give a tuple of arrays, (x,) of a single one")
        given, taken = aux or (), function.arrays if function else ()
        if len(given) != len(taken):
            words = f"{len(taken)} ({', '.join(array.name.removeprefix(f'{kind}_') for array in taken)})"
            raise ValueError(
                f"{kind}_aux has {len(given)} arrays but {kind}_mod takes {words if taken else 'none'}; give as many"
            )
        found |= {array.name: item for array, item in zip(taken, given, strict=True)}
    return found


def concrete(assumed: Spec, retrace: Retrace, types: Types) -> Spec:
    """The spec for arrays of these types. Raises ValueError where the functions are not those of `assumed` any more."""
    if retrace(None, None) != assumed:
        raise ValueError("mask_mod or score_mod refers to what has changed since it was compiled; compile it again")
    return retrace(*types)


def check(spec: Spec, problem: Problem, library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError for an array of the wrong rank, on another device than q, or without elements that a call needs."""
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    check_arrays(spec, library, library.device(arrays["q"]), arrays, 0 not in sizes)
    functions = [function for function in (spec.mask, spec.score) if function and "b" in variables(function.expr)]
    if functions and problem.batch > MAX_BLOCKS:
        raise ValueError(
            f"batch = {problem.batch} exceeds {MAX_BLOCKS}, and b is counted within one launch; split the batch"
        )


def check_arrays(
    spec: Spec, library: Library, device: int | None, arrays: Mapping[str, Any], has_elements: bool
) -> None:
    """The same for sizes that are not known yet; has_elements: there is one to evaluate the functions for."""
    for item in spec.arrays:
        array, name = arrays[item.name], shown(item.name)
        if library.dtype_name(array) != item.dtype.name:
            raise ValueError(
                f"{name} is {library.dtype_name(array)} but this kernel takes {item.dtype}; cast it to that"
            )
        if len(array.shape) != item.rank:
            raise ValueError(f"{name} has {len(array.shape)} dimensions but is indexed by {item.rank}; reshape it")
        check_device(item.name, library, array, device)
        if 0 in array.shape and has_elements:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, without an element to read; give it some")


def layouts(names: Iterable[str], library: Library, arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of each array the strides, in elements, and the last index of each axis: what a kernel is told beside the
    address."""
    return {
        name: (*library.strides(array), *(min(max(size - 1, 0), LARGEST) for size in array.shape))
        for name in names
        for array in (arrays[name],)
    }
