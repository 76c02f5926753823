"""A plan: every decision that the planner makes about one kernel, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashgen.plan.arch import Arch

KIB = 1024


@dataclass(frozen=True)
class Placement:
    """Where a shared buffer lies: byte offset, bytes of one stage, number of stages, bytes from row to row.

    swizzled: panels of 128 bytes a row as TMA writes them and wgmma reads them; row_bytes then counts all panels.
    """

    buffer: str
    offset: int
    stage_bytes: int
    stages: int
    row_bytes: int
    swizzled: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.stage_bytes * self.stages


@dataclass(frozen=True)
class Candidate:
    """One point of the search: block sizes, warps, stages, and how register tiles are divided among the warps.

    traits: what else a family's passes can do, by the words that its part of the planner gives them.
    resident: blocks that a multiprocessor should hold, where the family's part of the planner decides it.
    """

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: tuple[tuple[str, int], ...] = ()
    layouts: tuple[tuple[str, tuple[int, int]], ...] = ()
    traits: tuple[str, ...] = ()
    resident: int = 1

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of stages of each staged buffer."""
        return tuple(count for _, count in self.stages)

    @property
    def split(self) -> int:
        """Warps along the columns of the scores."""
        return dict(self.layouts).get("s", (self.warps, 1))[1]

    @property
    def persistent(self) -> bool:
        """A grid of as many blocks as run at once, which take tiles in a fixed order or ask for them."""
        return bool({"persistent", "dynamic"} & set(self.traits))

    def __str__(self) -> str:
        tile = " x ".join(f"{name.removeprefix('block_')} {size}" for name, size in self.blocks)
        warps = f"{self.warps} warp{'s' * (self.warps != 1)}"
        beside = f", {self.resident} blocks a multiprocessor" if self.resident > 1 else ""
        traits = "".join(f", {item}" for item in self.traits)
        return f"{tile}, {warps}{self._stages_text()}{self._layout_text()}{traits}{beside}"

    def _stages_text(self) -> str:
        """How deep the copies are staged: one number where all tiles agree."""
        depths = [
            count
            for name, count in self.stages
            if name.endswith("_tile") and not name.startswith(("lse", "delta", "ds"))
        ]
        if not depths:
            return ""
        text = str(depths[0]) if len(set(depths)) == 1 else " and ".join(map(str, depths))
        ahead = ", Q ahead" if {"k_tile", "q_tile"} <= dict(self.stages).keys() else ""
        return f", {text} stage{'s' * (text != '1')}{ahead}"

    def _layout_text(self) -> str:
        """How the scores are divided, where not by rows alone."""
        along_rows, along_cols = dict(self.layouts).get("s", (self.warps, 1))
        if along_cols > 1:
            return f", scores {along_rows} x {along_cols} among the warps"
        rows, cols = dict(self.layouts).get("o_acc", (self.warps, 1))
        return f", output {rows} x {cols} among the warps" if cols > 1 else ""


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate: rejected with a sentence, or ranked by its cost in clocks for each MFLOP.

    unfit: rejected for its shape on any chip, not for a limit of this one.
    excess: rejected for nothing but so many registers of a thread beyond the limit, by an estimate.
    """

    candidate: Candidate
    rejection: str = ""
    unfit: bool = False
    excess: int = 0
    cost: float = 0.0
    why: str = ""


LAST_FIRST = "last block first"  # a trait of candidates


@dataclass(frozen=True)
class Plan:
    """The decisions for one kernel on one chip.

    dims: numbers for the named dimensions of the kernel (head dims padded to the matrix instruction).
    registers: the estimate for one thread. min_blocks: blocks of the kernel that one multiprocessor should hold.
    vector_bytes: what one copy moves. unrolled_depth: steps of 16 in depth that a product from shared memory unrolls.
    producer_warps: warps behind the computing ones, of which one thread loads; role_registers: of the two roles.
    mbarriers: names and counts of those behind the tiles. covered_by_output: tiles over which O lies on its way out.
    keys_in_cache: keys (with their values) of which a third of the L2 is full.
    packed: query heads that share a tile of queries. own_blocks: each warpgroup passes over blocks of keys that its
    rows do not see. variants: a sentence for each other kernel that a call may choose, and for each part of the mask
    that is not known for whole tiles.
    """

    kernel: str
    arch: Arch
    dims: tuple[tuple[str, int], ...]
    candidate: Candidate
    shared: tuple[Placement, ...]
    registers: int
    min_blocks: int
    vector_bytes: int = 16
    unrolled_depth: int = 4
    producer_warps: int = 0
    role_registers: tuple[int, int] = (0, 0)
    mbarriers: tuple[tuple[str, int], ...] = ()
    covered_by_output: tuple[str, ...] = ()
    keys_in_cache: int = 0
    packed: int = 1
    own_blocks: bool = False
    variants: tuple[str, ...] = field(default=(), compare=False)
    source: str = "cost model"
    verdicts: tuple[Verdict, ...] = field(default=(), repr=False, compare=False)

    @property
    def warps(self) -> int:
        return self.candidate.warps

    @property
    def threads(self) -> int:
        return 32 * self.candidate.warps

    @property
    def computing_warps(self) -> int:
        """Warps that hold register tiles."""
        return self.candidate.warps - self.producer_warps

    @property
    def computing_threads(self) -> int:
        return 32 * self.computing_warps

    @property
    def barriers(self) -> tuple[tuple[str, int, int], ...]:
        """The mbarriers behind the tiles: (name, byte offset, count)."""
        offset, found = self.tile_bytes, []
        for name, count in self.mbarriers:
            found.append((name, offset, count))
            offset += 8 * count
        return tuple(found)

    def has(self, trait: str) -> bool:
        """True for a trait of the candidate."""
        return trait in self.candidate.traits

    @property
    def dynamic(self) -> bool:
        """A persistent grid whose blocks ask for their next tile."""
        return self.has("dynamic")

    @property
    def persistent(self) -> bool:
        """As many blocks as run at once, which take tiles one after another."""
        return self.candidate.persistent

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension name -> number."""
        return dict(self.dims)

    @property
    def stages(self) -> dict[str, int]:
        """Shared buffer -> number of stages, where more than one or pipelined."""
        return dict(self.candidate.stages)

    @property
    def layouts(self) -> dict[str, tuple[int, int]]:
        """Register tile -> (warps along rows, warps along columns)."""
        return dict(self.candidate.layouts)

    def copies(self, tile: str) -> int:
        """How many warps hold each part of a register tile with the same values: they have other parts of another."""
        down, across = self.layouts.get(tile, (self.computing_warps, 1))
        return 1 if self.has("divided") else self.computing_warps // (down * across)

    @property
    def tile_bytes(self) -> int:
        """Dynamic shared memory of the tiles."""
        return max((placement.end for placement in self.shared), default=0)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile_bytes + 8 * sum(count for _, _, count in self.barriers)

    def placement(self, buffer: str) -> Placement:
        """Where a shared buffer lies."""
        return next(placement for placement in self.shared if placement.buffer == buffer)

    def text(self) -> str:
        """The decisions, as kept in generated/: no costs, no rejections."""
        lines = [f"plan {self.kernel} for {self.arch.name}", f"  tile {self.candidate} (chosen by {self.source})"]
        lines.append("  " + ", ".join(f"{name} = {size}" for name, size in self.dims))
        if self.packed > 1:
            rows = self.sizes["block_q"]
            lines.append(f"  {self.packed} query heads share a tile, {rows // self.packed} queries of each")
        if self.own_blocks:
            lines.append("  each warpgroup passes over blocks of keys that its own rows do not see")
        lines.append(
            f"  {self.threads} threads, about {self.registers} registers each, {self.min_blocks} a multiprocessor"
        )
        lines.append(f"  shared memory {self.shared_bytes} of {self.arch.shared_for(self.candidate.resident)} bytes")
        for place in self.shared:
            lines.append(
                f"    {place.offset:6d} .. {place.end:6d}  {place.buffer}, {place.stages} x {place.stage_bytes} bytes, "
                f"{place.row_bytes} bytes a row"
            )
        for name, (rows, cols) in self.candidate.layouts:
            lines.append(f"  warps of {name}: {rows} along rows, {cols} along columns")
        return "\n".join(lines) + "\n"

    def explain(self) -> str:
        """The decisions, the ranking of the candidates that fit and a sentence for each that does not.

        A kernel that follows another's blocks has no candidates of its own.
        """
        if not self.verdicts:
            return self.text()
        ranked = [verdict for verdict in self.verdicts if not verdict.rejection]
        lines = [self.text().rstrip(), *(f"  {sentence}" for sentence in self.variants)]
        lines += ["  candidates that fit, best first (clocks a multiprocessor spends on a MFLOP):"]
        lines += [f"    {verdict.cost:8.1f}  {verdict.candidate}: {verdict.why}" for verdict in ranked]
        lines.append("  rejected:")
        lines += [f"    {verdict.candidate}: {verdict.rejection}" for verdict in self.verdicts if verdict.rejection]
        return "\n".join(lines) + "\n"
