"""Measured choices that override the cost model, each with the card, the date, the figure and the command.

`python -m flashgen tune` prints the lines; tests/unit/test_plan.py fails for one that no candidate fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate
from flashgen.spec import Spec

Key = tuple[str, str, int, int, bool]


@dataclass(frozen=True)
class Measured:
    """The choice of one candidate, by all that tells candidates apart.

    stages: the depth of every staged buffer, in the candidate's order. split: warps along the columns of the scores.
    """

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: tuple[int, ...]
    note: str
    split: int = 1

    def matches(self, candidate: Candidate) -> bool:
        """True for the candidate with these blocks, warps, stages and split."""
        own = (dict(self.blocks), self.warps, self.stages, self.split)
        return own == (dict(candidate.blocks), candidate.warps, candidate.depths, candidate.split)


# (arch, kernel, head_dim, head_dim_v, causal) -> choice
TABLE: dict[Key, Measured] = {
    ("sm_90a", "attention_forward", 128, 128, False): Measured(
        (("block_q", 128), ("block_kv", 176)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 585 TFLOP/s, the model's choice 541: "
        "python -m flashgen tune --arch sm_90a --direction fwd --head-dim 128 --full",
    ),
    ("sm_90a", "attention_forward", 128, 128, True): Measured(
        (("block_q", 128), ("block_kv", 176)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 520 TFLOP/s, the model's choice 496: "
        "python -m flashgen tune --arch sm_90a --direction fwd --head-dim 128 --causal",
    ),
}


def lookup(kernel: str, spec: Spec, arch: Arch) -> Measured | None:
    """The measured choice for a kernel, or None."""
    return TABLE.get(_key(kernel, spec, arch))


def line(kernel: str, spec: Spec, arch: Arch, candidate: Candidate, figure: str, command: str) -> str:
    """A measurement as an item of TABLE. figure: card, date and TFLOP/s. command: what measures it again."""
    values = [candidate.blocks, candidate.warps, candidate.depths]
    items = [*(f"{value!r}," for value in values), repr(f"{figure}: "), f"{command!r},"]
    items += [f"split={candidate.split},"] * (candidate.split != 1)
    text = "".join(f"        {item}\n" for item in items)
    return f"    {_key(kernel, spec, arch)!r}: Measured(\n{text}    ),".replace("'", '"')


def _key(kernel: str, spec: Spec, arch: Arch) -> Key:
    return arch.name, kernel, spec.head_dim, spec.head_dim_v, spec.causal
