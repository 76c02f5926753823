"""What the warps of a block share on sm90 beside memory: mbarriers, products in flight, named barriers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from flashgen.interp.shared_memory import InFlight
from flashgen.interp.warps import Block
from flashgen.machine import sm90
from flashgen.machine.sm90_facts import arrivals

Stage = tuple[str, int]


@dataclass
class Phases:
    """The two mbarriers of one stage of a tile, with what is on its way to it, and the warps that have arrived.

    beside: vectors that land in the same phase; missing: those whose copies are still to be issued. value: a published
    place. unfenced: warps that have read it themselves, and may not have what they read yet.
    """

    full: int = 0
    beside: tuple[str, ...] = ()
    missing: set[str] = field(default_factory=set)
    empty: int = 0
    arrived: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    unfenced: set[int] = field(default_factory=set)
    flying: list[InFlight] = field(default_factory=list)
    value: list[int] = field(default_factory=list)


@dataclass
class Meeting:
    """A named barrier: how many warps have come, and how often it has been complete."""

    arrived: int = 0
    complete: int = 0

    def arrive(self, count: int) -> bool:
        """One more warp; True where it is the last of `count`."""
        self.arrived = (self.arrived + 1) % count
        self.complete += self.arrived == 0
        return self.arrived == 0


@dataclass
class State:
    """What the block's warps share beside memory: mbarriers, products in flight of each warp, named barriers."""

    arrivals: dict[tuple[str, str], int]
    phases: dict[Stage, Phases] = field(default_factory=lambda: defaultdict(Phases))
    products: dict[int, list[tuple[sm90.Wgmma, np.ndarray]]] = field(default_factory=lambda: defaultdict(list))
    meetings: dict[str, Meeting] = field(default_factory=lambda: defaultdict(Meeting))


def state(block: Block) -> State:
    if "sm90" not in vars(block):
        vars(block)["sm90"] = State(arrivals(block.kernel, block.plan.computing_warps))
    return vars(block)["sm90"]
