"""Measured choices that override the cost model, each with the card, the date, the figure and the command.

`python -m flashgen tune` prints the lines; tests/unit/test_plan_tuned.py fails for one that no candidate fits.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate
from flashgen.spec import Spec

WIDTH = 100  # of a command in a line
Key = tuple[str, str, int, int, bool]


@dataclass(frozen=True)
class Measured:
    """The choice of one candidate, by all that tells candidates apart.

    stages: the depth of every staged buffer, in the candidate's order. split: warps along the columns of the scores.
    traits: the candidate's.
    """

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: tuple[int, ...]
    note: str
    split: int = 1
    traits: tuple[str, ...] = ()

    def matches(self, candidate: Candidate) -> bool:
        """True for the candidate with these blocks, warps, stages, split and traits."""
        own = (dict(self.blocks), self.warps, self.stages, self.split, self.traits)
        theirs = (candidate.warps, candidate.depths, candidate.split, candidate.traits)
        return own == (dict(candidate.blocks), *theirs)


# (arch, kernel, head_dim, head_dim_v, causal) -> choice
TABLE: dict[Key, Measured] = {
    ("sm_90a", "attention_forward", 64, 64, False): Measured(
        (("block_q", 192), ("block_kv", 128)),
        16,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 487 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --full --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 64, 64, True): Measured(
        (("block_q", 192), ("block_kv", 128)),
        16,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 443 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --causal --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 128, 128, False): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 639 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 128 --full --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 128, 128, True): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 620 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 128 --causal --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 256, 256, False): Measured(
        (("block_q", 128), ("block_kv", 80)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 701 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 256 --full --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 256, 256, True): Measured(
        (("block_q", 128), ("block_kv", 80)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 669 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 256 --causal --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
}


def lookup(kernel: str, spec: Spec, arch: Arch) -> Measured | None:
    """The measured choice for a kernel, or None."""
    return TABLE.get(_key(kernel, spec, arch))


def line(kernel: str, spec: Spec, arch: Arch, candidate: Candidate, figure: str, command: str) -> str:
    """A measurement as an item of TABLE. figure: card, date and TFLOP/s. command: what measures it again."""
    values = [candidate.blocks, candidate.warps, candidate.depths]
    words = textwrap.wrap(command, WIDTH, drop_whitespace=False, break_on_hyphens=False)
    items = [*(f"{value!r}," for value in values), repr(f"{figure}: "), *map(repr, words)]
    items[-1] += ","
    items += [f"split={candidate.split},"] * (candidate.split != 1)
    items += [f"traits={candidate.traits!r},"] * bool(candidate.traits)
    text = "".join(f"        {item}\n" for item in items)
    return f"    {_key(kernel, spec, arch)!r}: Measured(\n{text}    ),".replace("'", '"')


def _key(kernel: str, spec: Spec, arch: Arch) -> Key:
    return arch.name, kernel, spec.head_dim, spec.head_dim_v, spec.causal
