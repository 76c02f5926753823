"""The arrays that mask and score functions read: `mask_aux` and `score_aux` of a call, checked and described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flashgen.ir.dtype import F32, I32, DType
from flashgen.ir.expr import variables
from flashgen.runtime.arguments import Problem, check_device, shown
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.launch import MAX_BLOCKS
from flashgen.spec import Spec
from flashgen.trace import DTYPES, DTypes

LARGEST = 2**31 - 1  # an index has 32 bits
Types = tuple[DTypes | None, DTypes | None]  # of mask_aux and of score_aux
Retrace = Callable[[DTypes | None, DTypes | None], Spec]
BUILT_IN = {"bias": "bias=True", "alibi_slopes": "alibi=True"}  # arrays of options: arguments of a call by themselves


def dtypes(spec: Spec, arrays: Mapping[str, Any]) -> Types:
    """The types of the arrays of each function, by their names in the kernels; None where a function reads none."""
    found: list[DTypes | None] = []
    for kind, function in (("mask", spec.mask), ("score", spec.score)):
        names = [item.name for item in function.arrays] if function else []
        words = [name if name in BUILT_IN else f"{kind}_aux[{place}]" for place, name in enumerate(names)]
        types = tuple(_dtype(word, arrays[name]) for word, name in zip(words, names, strict=True))
        found.append(types or None)
    return found[0], found[1]


def dtypes_of(argument: str, arrays: Any) -> DTypes | None:
    """The same of arrays in their order, before there is a spec; None where there are none."""
    if arrays is None:
        return None
    return tuple(_dtype(f"{argument}[{place}]", array) for place, array in enumerate(arrays))


def _dtype(name: str, array: Any) -> DType:
    found = library_of(array, name).dtype_name(array)
    if found not in DTYPES:
        instead = "int32" if "int" in found or found == "bool" else "float32"
        raise ValueError(f"{name} is {found}; cast it to {instead}, or give one of {', '.join(DTYPES)}")
    return DTYPES[found]


def named(spec: Spec, mask_aux: Any, score_aux: Any, bias: Any = None, alibi_slopes: Any = None) -> dict[str, Any]:
    """The arrays by their names in the kernels; ValueError unless there are as many as the functions take."""
    if mask_aux is score_aux is bias is alibi_slopes is None and not spec.arrays:
        return {}
    found: dict[str, Any] = {}
    for kind, function, aux in (("mask", spec.mask, mask_aux), ("score", spec.score, score_aux)):
        if aux is not None and not isinstance(aux, tuple | list):
            what = type(aux).__name__
            raise TypeError(f"{kind}_aux is of type {what}; give a tuple of arrays, (x,) of a single one")
        given, every = aux or (), function.arrays if function else ()
        taken = [array for array in every if array.name not in BUILT_IN]
        if len(given) != len(taken):
            words = f"{len(taken)} ({', '.join(array.name.removeprefix(f'{kind}_') for array in taken)})"
            raise ValueError(
                f"{kind}_aux has {len(given)} arrays but {kind}_mod takes {words if taken else 'none'}; give as many"
            )
        found |= {array.name: item for array, item in zip(taken, given, strict=True)}
    return found | _built_in(spec, {"bias": bias, "alibi_slopes": alibi_slopes})


def _built_in(spec: Spec, given: dict[str, Any]) -> dict[str, Any]:
    """The arrays of options, with an axis of one element for each that is missing in front."""
    if spec.score is None and not any(array is not None for array in given.values()):
        return {}
    ranks = {item.name: item.rank for item in spec.arrays}
    found = {}
    for name, array in given.items():
        option = BUILT_IN[name]
        if array is None and name in ranks:
            raise ValueError(f"{name} is missing, which a kernel of {option} adds to its scores; give it")
        if array is not None and name not in ranks:
            raise ValueError(f"{name} is given to a kernel without {option}; compile it with that")
        if array is not None:
            library_of(array, name)
            found[name] = array[(None,) * max(ranks[name] - len(array.shape), 0)]
    return found


def differentiable(spec: Spec, word: str) -> str:
    """The name in the kernels of an array that gets a gradient: "bias", "alibi_slopes" or "score_aux[0]"."""
    every = spec.score.arrays if spec.score else ()
    words = {item.name if item.name in BUILT_IN else f"score_aux[{place}]": item for place, item in enumerate(every)}
    known = [key for key, item in words.items() if item.dtype != I32]
    if word not in known:
        raise ValueError(f"aux_grads has {word!r}; this kernel gives gradients of {', '.join(known) or 'no array'}")
    return words[word].name


def concrete(assumed: Spec, retrace: Retrace, types: Types) -> Spec:
    """The spec for arrays of these types. Raises ValueError where the functions are not those of `assumed` any more."""
    if retrace(None, None) != assumed:
        raise ValueError("mask_mod or score_mod refers to what has changed since it was compiled; compile it again")
    return retrace(*types)


def check(spec: Spec, problem: Problem, library: Library, arrays: Mapping[str, Any]) -> None:
    """ValueError for an array of the wrong rank, on another device than q, or without elements that a call needs."""
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    check_arrays(spec, library, library.device(arrays["q"]), arrays, 0 not in sizes)
    _check_built_in(problem, arrays)
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
        if name == "alibi_slopes" and item.dtype != F32:
            raise ValueError(f"alibi_slopes is {item.dtype}; cast it to float32")
        if len(array.shape) != item.rank:
            raise ValueError(f"{name} has {len(array.shape)} dimensions but is indexed by {item.rank}; reshape it")
        check_device(item.name, library, array, device)
        if 0 in array.shape and has_elements:
            raise ValueError(f"{name} has shape {tuple(array.shape)}, without an element to read; give it some")


def _check_built_in(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """ValueError for an array of an option that does not spread over the scores: index by index it would be read."""
    sizes = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    for name, words in (("bias", "(batch, heads, seqlen_q, seqlen_k)"), ("alibi_slopes", "(heads,) or (batch, heads)")):
        shape = tuple(arrays[name].shape) if name in arrays else ()
        smallest = (1, problem.heads) if name == "alibi_slopes" else (1,) * len(shape)
        if any(size not in pair for size, pair in zip(shape, zip(sizes, smallest, strict=False), strict=False)):
            what = ", each whole or 1" if name == "bias" else ""
            raise ValueError(f"{name} has shape {shape} and the call {words} = {sizes[: len(shape)]}{what}; reshape it")


def layouts(names: Iterable[str], library: Library, arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of each array the strides, in elements, and the last index of each axis: what a kernel is told beside the
    address."""
    return {
        name: (*library.strides(array), *(min(max(size - 1, 0), LARGEST) for size in array.shape))
        for name in names
        for array in (arrays[name],)
    }
