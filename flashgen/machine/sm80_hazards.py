"""Static check of shared-memory hazards: the program is walked as one warp issues it, with 0 to 4 loop steps.

Between two barriers the warps run in any order, so at each access the walk asks: has what is read been waited for and
shown to all by a barrier; does what is overwritten still have readers, or a copy in flight? Buffers that the byte map
lays over each other are checked against each other, also that a value is not read after another was laid over it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.ir.expr import Load, walk
from flashgen.ir.expr import evaluate as value_of
from flashgen.ir.nodes import For, Kernel, Space, Stmt, Tile
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import Body
from flashgen.machine.base import Barrier, StoreFragment
from flashgen.machine.sm80 import CommitGroup, Sm80Stmt, WaitGroup
from flashgen.plan.plan import Plan

Path = tuple[int, ...]

# Loops are walked with each of these numbers of steps: none, and enough for every stage to be the last one.
STEPS = (4, 3, 2, 1, 0)


@dataclass(frozen=True)
class Hazard:
    """A statement (by its path of positions in nested bodies) that is not protected, and why."""

    path: Path
    text: str
    reason: str
    in_flight: bool

    def __str__(self) -> str:
        return f"{self.text}: {self.reason}"


@dataclass
class Region:
    """State of one stage of a shared buffer; `writer` says which statement divided it among the threads, and how."""

    start: int
    end: int
    writer: tuple = ()
    lost_to: str = ""
    group: int | None = None
    landed: bool = True
    visible: bool = True
    read: bool = False

    def overlaps(self, other: Region) -> bool:
        return self.start < other.end and other.start < self.end


def hazards(kernel: Kernel, plan: Plan) -> list[Hazard]:
    """Every hazard found, in the order of the walk, each statement once."""
    found: dict[Path, Hazard] = {}
    for hazard in _walks(kernel, plan):
        found.setdefault(hazard.path, hazard)
    return list(found.values())


def safe(kernel: Kernel, plan: Plan) -> bool:
    """True where no walk finds a hazard; ends at the first."""
    return next(_walks(kernel, plan), None) is None


def _walks(kernel: Kernel, plan: Plan) -> Iterator[Hazard]:
    for steps in STEPS:
        yield from _Walk(kernel, plan, steps).run()


class _Walk:
    """One walk through the program with a fixed number of steps for each loop."""

    def __init__(self, kernel: Kernel, plan: Plan, steps: int) -> None:
        self.kernel = kernel
        self.steps = steps
        self.committed = 0
        self.regions = {
            (place.buffer, stage): Region(
                place.offset + stage * place.stage_bytes, place.offset + (stage + 1) * place.stage_bytes
            )
            for place in plan.shared
            for stage in range(place.stages)
        }

    def run(self) -> Iterator[Hazard]:
        for path, stmt, values in self._trace(self.kernel.body, (), {}):
            yield from self._step(path, stmt, values)

    def _trace(self, body: Body, path: Path, values: dict[str, int]) -> Iterator[tuple[Path, Stmt, dict[str, int]]]:
        for position, stmt in enumerate(body):
            here = (*path, position)
            if isinstance(stmt, For):
                for step in range(self.steps):
                    yield from self._trace(stmt.body, here, values | {stmt.axis: step})
            elif hasattr(stmt, "body"):
                yield from self._trace(stmt.body, here, values)
            else:
                yield here, stmt, values

    def _step(self, path: Path, stmt: Stmt, values: dict[str, int]) -> Iterator[Hazard]:
        if isinstance(stmt, Barrier):
            for region in self.regions.values():
                region.visible, region.read = region.landed, False
        elif isinstance(stmt, CommitGroup):
            self.committed += 1
        elif isinstance(stmt, WaitGroup):
            for region in self.regions.values():
                if region.group is not None and region.group < self.committed - stmt.pending:
                    region.landed, region.group = True, None
        for reason, in_flight in self._accesses(stmt, values):
            yield Hazard(path, stmt_text(stmt), reason, in_flight)

    def _accesses(self, stmt: Stmt, values: dict[str, int]) -> Iterator[tuple[str, bool]]:
        for key in self._shared(stmt, stmt.reads(), values):
            region = self.regions[key]
            if not region.writer:
                yield f"reads {key[0]} before anything was written to this stage", False
            elif region.lost_to:
                yield f"reads {key[0]} after {region.lost_to} was written over it", False
            elif not region.landed:
                yield f"reads {key[0]} while its copy is in flight", True
            elif not region.visible:
                yield f"reads {key[0]} before a barrier has shown it to all warps", False
            region.read = True
        asynchronous = isinstance(stmt, Sm80Stmt) and stmt.ASYNCHRONOUS
        for key in self._shared(stmt, stmt.writes(), values):
            yield from self._write(key, self._writer(stmt), asynchronous)

    def _writer(self, stmt: Stmt) -> tuple:
        """What decides which thread writes which element: the kind of statement, and its register tile's layout."""
        return type(stmt), self.kernel.buffer(stmt.src).warps if isinstance(stmt, StoreFragment) else None

    def _write(self, key: tuple[str, int], writer: tuple, asynchronous: bool) -> Iterator[tuple[str, bool]]:
        region = self.regions[key]
        for other_key, other in self.regions.items():
            if not other.overlaps(region):
                continue
            if not other.landed:
                yield f"overwrites {other_key[0]} while its copy is in flight", True
            elif other.read:
                yield f"overwrites {other_key[0]} while other warps may still read it", False
            elif not other.visible and (other_key != key or other.writer != writer):
                yield f"overwrites {other_key[0]} while other warps may still write it", False
            other.lost_to = key[0]
        region.writer, region.lost_to = writer, ""
        region.landed = not asynchronous
        region.visible = False
        region.group = self.committed if asynchronous else None

    def _shared(self, stmt: Stmt, places: tuple, values: dict[str, int]) -> Iterator[tuple[str, int]]:
        """The stages that a statement touches among some places."""
        for place in places:
            if isinstance(place, Tile):
                yield place.buffer, self._stage(place.stage, values)
            elif isinstance(place, str) and self.kernel.space(place) is Space.SHARED:
                yield place, self._loaded_stage(stmt, place, values)

    def _stage(self, stage, values: dict[str, int]) -> int:
        """The stage at these loop steps; bounds that depend on sizes count as zero."""
        return value_of(stage, defaultdict(int, values))

    def _loaded_stage(self, stmt: Stmt, buffer: str, values: dict[str, int]) -> int:
        """The stage that an expression loads from: the additional first index, where the buffer has stages."""
        for expr in stmt.expressions():
            for node in walk(expr):
                if isinstance(node, Load) and node.buffer == buffer:
                    staged = len(node.index) > len(self.kernel.buffer(buffer).shape)
                    return self._stage(node.index[0], values) if staged else 0
        return 0
