"""The mask of a spec drawn: which query sees which key, and what the intervals tell of each block of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np

from flashgen.attention import parts
from flashgen.calculus import loop_limits, somewhere_hidden
from flashgen.interp.common import Uniform
from flashgen.interp.common import evaluate as by_elements
from flashgen.ir.expr import Const, Expr, ceil_div, evaluate, substitute
from flashgen.spec import Spec

SKIPPED, PARTIAL, FULL = 0, 1, 2  # a block that is not visited, one that is masked, one that needs no mask
BY_ELEMENT = 128  # up to so many queries and keys a character is one pair of them, above it is a block
ENLARGED = 4  # pixels of a picture for a pair, each way
WHITE, MASKED, LINE = (255, 255, 255), (238, 232, 222), (205, 205, 205)
STRONG = {PARTIAL: (213, 94, 0), FULL: (0, 114, 178)}  # of Okabe and Ito's palette
RANGES: dict[str, tuple[Expr, Expr]] = {
    "i": (Const(0), parts.BLOCK_Q - 1),
    "j": (Const(0), parts.BLOCK_KV - 1),
}


@dataclass(frozen=True)
class Sizes:
    """What a mask is drawn at."""

    seqlen_q: int
    seqlen_k: int
    heads: int
    head: int
    batch: int
    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        for name in ("seqlen_q", "seqlen_k", "heads", "block_q", "block_kv"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be 1 or more to be drawn")
        if not 0 <= self.head < self.heads:
            raise ValueError(f"head = {self.head} is not one of {self.heads} heads; use 0 to {self.heads - 1}")
        if self.batch < 0:
            raise ValueError(f"batch = {self.batch} must be 0 or more")


@dataclass(frozen=True)
class Drawing:
    """visible: (seqlen_q, seqlen_k), what the mask itself says; blocks: SKIPPED, PARTIAL or FULL by the intervals.

    scores: what the score function makes of a score of 1, None without one.
    """

    spec: Spec
    sizes: Sizes
    visible: np.ndarray
    blocks: np.ndarray
    scores: np.ndarray | None


def options(function: Callable) -> Callable:
    """The options of Sizes; the command is handed each by its name."""
    for flag, default, meaning in (
        ("--block-kv", 8, "Keys of a block that is drawn."),
        ("--block-q", 8, "Queries of a block that is drawn (--plan has the kernel's own)."),
        ("--batch", 0, "The batch that is drawn."),
        ("--head", 0, "The head that is drawn."),
        ("--heads", 4, "Heads of q that a mask or score function is told of."),
        ("--seqlen-k", 64, "Keys that are drawn."),
        ("--seqlen-q", 64, "Queries that are drawn."),
    ):
        function = click.option(flag, type=int, default=default, show_default=True, help=meaning)(function)
    return function


def draw(spec: Spec, sizes: Sizes) -> Drawing:
    """The mask and the score function of the spec, evaluated, and its blocks as the kernel's passes take them."""
    if spec.arrays:
        read = ", ".join(array.name for array in spec.arrays)
        raise ValueError(f"{spec} reads arrays that only a call has: {read}; draw functions without arrays")
    spec = replace(spec, packed=1)
    names: dict[str, Any] = {
        **{name: getattr(sizes, name) for name in ("seqlen_q", "seqlen_k", "heads", "head", "batch")},
        **{"q_start": 0, "kv_start": 0, "i": np.arange(sizes.seqlen_q)[:, None], "j": np.arange(sizes.seqlen_k)},
    }
    shape = (sizes.seqlen_q, sizes.seqlen_k)
    visible = np.broadcast_to(by_elements(parts.visible(spec), Uniform(names)), shape)
    scores = None
    if spec.score is not None:
        arguments = {"b": sizes.batch, "h": sizes.head, "q_idx": names["i"], "kv_idx": names["j"]}
        with np.errstate(all="ignore"):
            one = Uniform(names | arguments | {"score": np.float32(1)})
            scores = np.broadcast_to(by_elements(spec.score.expr, one), shape)
    return Drawing(spec, sizes, visible, blocks(spec, sizes), scores)


def blocks(spec: Spec, sizes: Sizes) -> np.ndarray:
    """SKIPPED, PARTIAL or FULL of each block, by the questions that skip_blocks and guard_masks ask."""
    mask = substitute(parts.visible(spec), {"kv_start": parts.KV_BLOCK * parts.BLOCK_KV})
    all_blocks = ceil_div(parts.SEQLEN_K, parts.BLOCK_KV)
    start, stop = loop_limits(mask, parts.KV_BLOCK.name, RANGES, Const(0), all_blocks)
    guard = somewhere_hidden(mask, RANGES)
    names = {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}
    found = np.full((-(-sizes.seqlen_q // sizes.block_q), evaluate(all_blocks, names)), SKIPPED)
    for q_block in range(len(found)):
        names["q_start"] = q_block * sizes.block_q
        for kv_block in range(evaluate(start, names), evaluate(stop, names)):
            names["kv_block"] = kv_block
            found[q_block, kv_block] = PARTIAL if guard is None or evaluate(guard, names) else FULL
    return found


def by_pair(drawing: Drawing) -> np.ndarray:
    """The class of the block that each pair lies in."""
    sizes = drawing.sizes
    wide = drawing.blocks.repeat(sizes.block_q, axis=0).repeat(sizes.block_kv, axis=1)
    return wide[: sizes.seqlen_q, : sizes.seqlen_k]


def drawing_text(drawing: Drawing) -> str:
    """A head line, the legend and a line a query; where there are many, a line a block of queries."""
    sizes, spec = drawing.sizes, drawing.spec
    place = f"batch {sizes.batch}, head {sizes.head} of {sizes.heads}"
    counts = np.bincount(drawing.blocks.ravel(), minlength=3)
    lines = [
        f"{spec}: {sizes.seqlen_q} queries down, {sizes.seqlen_k} keys across; {place}",
        *(f"mask: {function.text}" for function in (parts.CAUSAL if spec.causal else None, spec.mask) if function),
        *([f"score: {spec.score.text}"] if spec.score else []),
        f"{int(drawing.visible.sum())} of {drawing.visible.size} pairs are visible; blocks of {sizes.block_q} x "
        f"{sizes.block_kv}: {counts[FULL]} full, {counts[PARTIAL]} partial, {counts[SKIPPED]} skipped",
    ]
    if max(sizes.seqlen_q, sizes.seqlen_k) <= BY_ELEMENT:
        lines.append("# visible, in a full block; o visible, in a partial one; . hidden there; blank: skipped")
        return "\n".join([*lines, *pair_lines(drawing)]) + "\n"
    lines.append("a character a block: # full, o partial, blank: skipped")
    return "\n".join([*lines, *("".join(" o#"[kind] for kind in row).rstrip() for row in drawing.blocks)]) + "\n"


def pair_lines(drawing: Drawing) -> Iterator[str]:
    """A character a pair of query and key."""
    for seen, kinds in zip(drawing.visible, by_pair(drawing), strict=True):
        line = "".join(" o#"[kind] if sees or kind == SKIPPED else "." for sees, kind in zip(seen, kinds, strict=True))
        yield line.rstrip()


def pixels(drawing: Drawing) -> np.ndarray:
    """The picture: blue where a full block is visible, orange in a partial one, the paler the less a score of 1 gets.

    What is masked in a partial block is grey, and blocks that are skipped are white.
    """
    kinds, strength = by_pair(drawing), shades(drawing)[..., None]
    image = np.full((*kinds.shape, 3), WHITE, np.float64)
    image[kinds != SKIPPED] = MASKED
    for kind, colour in STRONG.items():
        shown = strength * np.array(colour) + (1 - strength) * np.array(WHITE)
        image = np.where((drawing.visible & (kinds == kind))[..., None], shown, image)
    image = image.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
    image[:: drawing.sizes.block_q * ENLARGED] = LINE
    image[:, :: drawing.sizes.block_kv * ENLARGED] = LINE
    return image.round().astype(np.uint8)


def shades(drawing: Drawing) -> np.ndarray:
    """From 0.15, the least score, to 1, the largest; 0 for -inf. In steps, so that files stay small."""
    if drawing.scores is None:
        return np.ones(drawing.visible.shape)
    finite = np.isfinite(drawing.scores)
    seen = drawing.scores[finite & drawing.visible]
    least, largest = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 0.0)
    span = largest - least
    with np.errstate(invalid="ignore"):
        part = (drawing.scores - least) / span if span > 0 else np.ones_like(drawing.scores)
    return np.where(finite, 0.15 + 0.85 * np.round(np.where(finite, part, 0.0).clip(0, 1) * 32) / 32, 0.0)


def write_png(drawing: Drawing, path: str) -> None:
    """The picture as a file. Raises ImportError, with one sentence, without matplotlib."""
    try:
        from matplotlib import image
    except ImportError:
        raise ImportError(
            "--png draws with matplotlib, which is not installed; pip install 'flashgen[bench]'"
        ) from None
    unversioned: dict[str, Any] = {"Software": None}
    image.imsave(path, pixels(drawing), format="png", metadata=unversioned)
