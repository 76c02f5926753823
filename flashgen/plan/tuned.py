"""Measured choices that override the cost model: one line each, with the card, the date, the command and the figure."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate
from flashgen.spec import Spec


@dataclass(frozen=True)
class Measured:
    """A choice for a kernel at a head_dim: blocks, warps, stages of the first copied tile."""

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: tuple[int, ...]
    note: str

    def matches(self, candidate: Candidate) -> bool:
        """True for the candidate with these blocks, warps and stages."""
        depth = tuple(count for _, count in candidate.stages)
        return dict(self.blocks) == dict(candidate.blocks) and self.warps == candidate.warps and self.stages == depth


# (arch, kernel, head_dim, head_dim_v, causal) -> choice
TABLE: dict[tuple[str, str, int, int, bool], Measured] = {}


def lookup(kernel: str, spec: Spec, arch: Arch) -> Measured | None:
    """The measured choice for a kernel, or None."""
    return TABLE.get((arch.name, kernel, spec.head_dim, spec.head_dim_v, spec.causal))
