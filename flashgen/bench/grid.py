"""The cells of the benchmark: which attention is timed, and how many floating-point operations it has.

Every cell holds the same amount of data: batch * seqlen = 16384 tokens and heads * head_dim = 2048 channels in bf16,
so that a cell with longer sequences has more work for the same bytes. q, k, v and o have the same length and the same
number of heads. Packed sequences alone have lengths of their own, and more tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen.bench.variants import CAUSAL, own_seqlens, visible

TOKENS = 16384  # batch * seqlen
CHANNELS = 2048  # heads * head_dim
DIRECTIONS = ("fwd", "bwd")


def mask_name(causal: bool, variant: str = "") -> str:
    """The name of a mask, "causal" or "full", and of a variant."""
    return ("causal" if causal else "full") + f" {variant}" * bool(variant)


@dataclass(frozen=True)
class Cell:
    """One point of the grid: forward or backward of one attention shape.

    `direction` is "fwd" or "bwd"; the backward is the gradient of q, k and v alone, without the forward.
    `head_dim` and `seqlen` count elements and positions; packed sequences are one of all their tokens. `variant` names
    one of `variants.VARIANTS`, or is empty.
    """

    direction: str
    head_dim: int
    causal: bool
    seqlen: int
    variant: str = ""

    @property
    def batch(self) -> int:
        """Sequences in the batch; at least one."""
        return max(1, TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        """Heads of q, k and v; at least one."""
        return max(1, CHANNELS // self.head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seqlen, heads, head_dim) of q, k, v, o and their gradients."""
        return (self.batch, self.seqlen, self.heads, self.head_dim)

    @property
    def flops(self) -> int:
        """Floating-point operations: 4 * b * h * s * s * d forward, half of that if causal, 2.5 times that backward.

        The customary count: two matrix products forward, five backward, the softmax not counted. Of a variant with a
        mask only what is seen counts.
        """
        seen = visible(self.variant, self.causal, self.seqlen)
        forward = 4 * self.batch * self.heads * seen * self.head_dim
        return forward if self.direction == "fwd" else forward * 5 // 2

    @property
    def mask(self) -> str:
        """The name of the mask, "causal" or "full", and of the variant."""
        return mask_name(self.causal, self.variant)

    def __str__(self) -> str:
        return f"{self.direction} d{self.head_dim} {self.mask} {self.seqlen}"


@dataclass(frozen=True)
class Preset:
    """A named part of the grid: the product of its head dims, masks and sequence lengths, in both directions."""

    head_dims: tuple[int, ...]
    causal: tuple[bool, ...]
    seqlens: tuple[int, ...]
    why: str


PRESETS = {
    "spine": Preset((64, 128), (False, True), (2048, 4096, 8192, 16384), "head_dim 64 and 128, 2k to 16k"),
    "full": Preset((64, 128, 256), (False, True), (512, 1024, 2048, 4096, 8192, 16384), "all 36 shapes"),
    "quick": Preset((128,), (False, True), (4096,), "two shapes, to see that everything runs"),
}


def cells(
    preset: str = "spine",
    directions: Iterable[str] = DIRECTIONS,
    head_dims: Sequence[int] | None = None,
    causal: Sequence[bool] | None = None,
    seqlens: Sequence[int] | None = None,
    variants: Sequence[str] = (),
) -> list[Cell]:
    """The cells of a preset, with any axis replaced by the values given; ordered as the table is.

    Of variants each is timed with the mask that it is used with, whatever the preset's, and packed sequences have the
    lengths that they have.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    chosen, base = tuple(directions), PRESETS[preset]
    unknown = [direction for direction in chosen if direction not in DIRECTIONS]
    if unknown:
        raise ValueError(f"unknown direction {unknown[0]!r}: choose fwd or bwd")
    kinds = [(CAUSAL[name], name) for name in variants] or [(masked, "") for masked in causal or base.causal]
    return [
        Cell(direction, head_dim, masked, seqlen, variant)
        for direction in DIRECTIONS
        if direction in chosen
        for head_dim in head_dims or base.head_dims
        for masked, variant in kinds
        for seqlen in own_seqlens(variant) or seqlens or base.seqlens
    ]
