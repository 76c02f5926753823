"""The options of a call as mask and score functions: `causal`, `window`, `softcap`, `mask_mod`, `score_mod`, `bias`,
`alibi`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from flashgen import masks, scores, trace
from flashgen.ir.dtype import F32
from flashgen.spec import Function

ALIGNMENTS = {True: "bottom-right", False: "", "bottom-right": "bottom-right", "top-left": "top-left"}
Window = tuple[int | None, int | None]
# What options add to the scores, and the name of the array that it reads, in a call as in the kernels.
ADDED = {"bias": (scores.bias, "bias"), "alibi": (scores.slopes_by_batch, "alibi_slopes")}


def functions(
    causal: bool | str,
    window: Window | None = None,
    softcap: float | None = None,
    mask_mod: Callable | None = None,
    score_mod: Callable | None = None,
    mask_dtypes: trace.DTypes | None = None,
    score_dtypes: trace.DTypes | None = None,
    bias: bool = False,
    alibi: bool = False,
) -> tuple[bool, Function | None, Function | None]:
    """`causal`, `mask` and `score` of the Spec: a query sees what all masks show it, and scores are capped first.

    Then score_mod has its turn, and what is added to scores comes last, the bias and then ALiBi.
    mask_dtypes, score_dtypes: of the arrays that all masks and all score functions read; assumed where None.
    Raises TypeError or ValueError, with one sentence, for what is not an option or cannot be traced.
    """
    alignment = _alignment(causal)
    top_left = alignment == "top-left"
    mask = trace.mask(masks.causal_top_left) if top_left else None
    if window is not None:
        mask = trace.both(mask, trace.mask(masks.window(*_sides(window), top_left)))
    if mask_mod is not None:
        mask = trace.both(mask, trace.mask(mask_mod, mask_dtypes))
    score = None if softcap is None else trace.score(scores.softcap(_cap(softcap)))
    added = [name for name, asked in (("bias", bias), ("alibi", alibi)) if _flag(name, asked)]
    first = len(score_dtypes) - len(added) if score_dtypes is not None else 0
    if score_mod is not None:
        score = trace.behind(score, trace.score(score_mod, None if score_dtypes is None else score_dtypes[:first]))
    for place, name in enumerate(added):
        function, array = ADDED[name]
        of_type = trace.score(function, (F32 if score_dtypes is None else score_dtypes[first + place],))
        assert of_type is not None
        score = trace.behind(score, trace.renamed(of_type, array))
    return alignment == "bottom-right", mask, score


def _flag(name: str, asked: bool) -> bool:
    if not isinstance(asked, bool):
        raise TypeError(f"{name} = {asked!r} must be True or False; a call of the kernel brings the array")
    return asked


def _alignment(causal: bool | str) -> str:
    if not isinstance(causal, bool | str) or causal not in ALIGNMENTS:
        raise TypeError(f"causal = {causal!r} must be True or False, 'top-left' or 'bottom-right' (which is True)")
    return ALIGNMENTS[causal]


def _sides(window: Window) -> Window:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window = {window!r} must be a pair (left, right), each a number of keys or None")
    left, right = (_side(window, side) for side in window)
    return left, right


def _side(window: Window, side: int | None) -> int | None:
    if side is None:
        return None
    try:
        count = -1 if isinstance(side, bool) else operator.index(side)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(f"window = {window!r}: {side!r} must be an integer from 0 on, or None for any number of keys")
    return count


def _cap(softcap: float) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, int | float):
        raise TypeError(f"softcap must be a Python number or None, not {type(softcap).__name__}")
    if not (0 < softcap < math.inf):
        raise ValueError(f"softcap = {softcap!r} must be positive and finite, or None for no cap")
    return float(softcap)
