"""Shared memory as the hardware sees it: bytes, in which buffers may overlap, and what they have been through.

Memory is kept in cells of two bytes. For each cell: who wrote it last, under which buffer and stage, in which epoch
(the number of barriers passed so far), whether an asynchronous copy is on its way to it or reads it, and which warps
have read it in this epoch. Between two barriers warps run in any order, so an access is judged by what *may* have
happened:

    read    the cell was written under this buffer and stage, in an earlier epoch, and no copy is on its way
    write   no copy is on its way or reads it, no other warp has read or written the cell in this epoch

A warp that reads its own writes needs a barrier too: its lanes read each other's values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flashgen.interp.common import Hazard, Value, round_to
from flashgen.ir.dtype import BF16, DType
from flashgen.ir.nodes import Kernel, Space, Stmt
from flashgen.ir.printer import stmt_text
from flashgen.plan.plan import Plan

NOBODY = -1
UNWRITTEN = 0xFFFF  # a NaN in bfloat16 and float16, and in float32 where both halves have it


@dataclass(frozen=True)
class Access:
    """A warp that executes a statement on one stage of a buffer."""

    warp: int
    stmt: Stmt
    buffer: str
    stage: int

    def hazard(self, reason: str) -> Hazard:
        return Hazard(f"warp {self.warp}, `{stmt_text(self.stmt)}`, {self.buffer} stage {self.stage}: {reason}")


@dataclass(frozen=True)
class InFlight:
    """The part of an asynchronous copy that one warp has issued: it lands when that warp has waited for it."""

    access: Access
    cells: np.ndarray
    raw: np.ndarray


def encode(dtype: DType, values: np.ndarray) -> np.ndarray:
    """float32 values -> cells, in a trailing axis of one or two."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype.bytes == 4:
        return values.view(np.uint16).reshape(*values.shape, 2)
    if dtype == BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)[..., None]
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)[..., None]


def decode(dtype: DType, raw: np.ndarray) -> np.ndarray:
    """Cells -> float32 values."""
    if dtype.bytes == 4:
        return np.ascontiguousarray(raw).view(np.float32)[..., 0]
    if dtype == BF16:
        return (raw[..., 0].astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(raw[..., 0]).view(np.float16).astype(np.float32)


class SharedMemory:
    """The shared memory of one block."""

    def __init__(self, kernel: Kernel, plan: Plan):
        sizes = plan.sizes
        self.buffers = {item.name: item for item in kernel.buffers if item.space is Space.SHARED}
        self.shapes = {item.name: tuple(sizes[dim] for dim in item.shape) for item in self.buffers.values()}
        self.placements = {name: plan.placement(name) for name in self.buffers}
        self.owners: list[tuple[str, int]] = []
        count = plan.shared_bytes // 2
        self.raw = np.full(count, UNWRITTEN, np.uint16)
        self.owner = np.full(count, NOBODY)
        self.writer = np.full(count, NOBODY)
        self.written = np.full(count, -1)
        self.flight = np.full(count, NOBODY)
        self.unfenced = np.zeros(count, bool)
        self.leaving = np.full(count, NOBODY)
        self.read_in = np.full(count, -1)
        self.readers = np.zeros(count, np.uint64)
        self.epoch = 0

    def barrier(self) -> None:
        """All warps have met: what was written before is visible after, what was read may be overwritten."""
        self.epoch += 1

    def read(self, access: Access, *index: Value) -> np.ndarray:
        """Elements at (rows[, columns]), which broadcast."""
        cells = self._cells(access, index)
        self._check_read(access, cells)
        old = np.where(self.read_in[cells] == self.epoch, self.readers[cells], np.uint64(0))
        self.readers[cells] = old | np.uint64(1 << access.warp)
        self.read_in[cells] = self.epoch
        return decode(self.buffers[access.buffer].dtype, self.raw[cells])

    def write(self, access: Access, values: np.ndarray, *index: Value) -> None:
        """Stores at once; the values must be those of the storage type already."""
        cells = self._cells(access, index)
        self._check_write(access, cells)
        self._mark(access, cells, self._encode(access, values))
        self.unfenced[cells] = True

    def issue(self, access: Access, values: np.ndarray, *index: Value) -> InFlight:
        """Starts an asynchronous copy: from now until it lands nobody may read or write its cells."""
        cells = self._cells(access, index)
        self._check_write(access, cells)
        self.flight[cells] = access.warp
        self.raw[cells] = UNWRITTEN
        self.owner[cells] = self._owner(access)
        return InFlight(access, cells, self._encode(access, values))

    def land(self, copy: InFlight) -> None:
        """The issuing warp has waited for the copy."""
        self.flight[copy.cells] = NOBODY
        self.unfenced[copy.cells] = False
        self._mark(copy.access, copy.cells, copy.raw)

    def publish(self, copy: InFlight) -> None:
        """What has landed is seen by whoever waits on the mbarrier of the copy: no barrier of the block is needed."""
        self.written[copy.cells] = NOBODY

    def meet(self, warps: Iterable[int]) -> None:
        """Some warps have met: what these wrote is visible to them, and what they read may be overwritten."""
        members = list(warps)
        self.written[np.isin(self.writer, members) & (self.written == self.epoch)] = NOBODY
        self.readers &= ~np.uint64(sum(1 << warp for warp in members))

    def fence(self, warp: int) -> None:
        """What a warp has written will be seen by copies that read through another proxy."""
        self.unfenced[self.writer == warp] = False

    def leave(self, access: Access, *index: Value) -> np.ndarray:
        """Elements that an asynchronous copy reads from now until `left`: nobody may overwrite them."""
        cells = self._cells(access, index)
        self._check_read(access, cells)
        if np.any(self.unfenced[cells]):
            raise access.hazard("read by a copy with no fence since it was written")
        self.leaving[cells] = access.warp
        return decode(self.buffers[access.buffer].dtype, self.raw[cells])

    def read_by_proxy(self, access: Access, *index: Value) -> np.ndarray:
        """Elements that a product reads: what warps have stored there themselves has to be fenced."""
        if np.any(self.unfenced[self._cells(access, index)]):
            raise access.hazard("read by a product with no fence since it was written")
        return self.read(access, *index)

    def left(self, warp: int) -> None:
        """The copies that a warp started have read what they copy."""
        self.leaving[self.leaving == warp] = NOBODY

    def release(self, access: Access) -> None:
        """Every reader of a stage has said that it is done."""
        self.readers[self._stage(access)] = 0

    def hand_over(self, access: Access) -> None:
        """What a warp has written to a stage is seen by whoever waits for it."""
        stage = self._stage(access)
        self.written[stage][self.writer[stage] == access.warp] = NOBODY

    def _stage(self, access: Access) -> slice:
        """The cells of a stage of a buffer."""
        place = self.placements[access.buffer]
        first = (place.offset + access.stage * place.stage_bytes) // 2
        return slice(first, first + place.stage_bytes // 2)

    def nbytes(self, buffer: str, count: int) -> int:
        return self.buffers[buffer].dtype.bytes * count

    def _cells(self, access: Access, index: tuple[Value, ...]) -> np.ndarray:
        """Cell numbers of elements, with a trailing axis over the cells of one element."""
        buffer, place = self.buffers[access.buffer], self.placements[access.buffer]
        if not 0 <= access.stage < place.stages:
            raise access.hazard(f"the buffer has {place.stages} stages")
        for part, size in zip(index, self.shapes[access.buffer], strict=True):
            if np.size(part) and (np.min(part) < 0 or np.max(part) >= size):
                raise access.hazard(f"an index from {np.min(part)} to {np.max(part)} leaves the {size} that there are")
        address = place.offset + access.stage * place.stage_bytes + np.asarray(index[0]) * place.row_bytes
        if len(index) == 2:
            address = address + np.asarray(index[1]) * buffer.dtype.bytes
        return (address // 2)[..., None] + np.arange(buffer.dtype.bytes // 2)

    def _encode(self, access: Access, values: np.ndarray) -> np.ndarray:
        dtype = self.buffers[access.buffer].dtype
        if not np.array_equal(round_to(dtype, values), values, equal_nan=True):
            raise access.hazard(f"a value is stored that no {dtype} is: it was not packed")
        return encode(dtype, values)

    def _owner(self, access: Access) -> int:
        key = (access.buffer, access.stage)
        if key not in self.owners:
            self.owners.append(key)
        return self.owners.index(key)

    def _mark(self, access: Access, cells: np.ndarray, raw: np.ndarray) -> None:
        self.raw[cells] = raw
        self.owner[cells] = self._owner(access)
        self.writer[cells] = access.warp
        self.written[cells] = self.epoch

    def _check_read(self, access: Access, cells: np.ndarray) -> None:
        self._check_flight(access, cells, "read")
        owner, mine = self.owner[cells], self._owner(access)
        if np.any(owner != mine):
            other = int(owner[owner != mine].flat[0])
            if other == NOBODY:
                raise access.hazard("read before anything was written to it")
            name, stage = self.owners[other]
            raise access.hazard(f"read where {name} stage {stage} was written last: they share these bytes")
        fresh = self.written[cells] == self.epoch
        if np.any(fresh):
            writer = int(self.writer[cells][fresh].flat[0])
            raise access.hazard(f"read with no barrier since warp {writer} wrote it")

    def _check_write(self, access: Access, cells: np.ndarray) -> None:
        self._check_flight(access, cells, "overwritten")
        if np.any(self.leaving[cells] != NOBODY):
            raise access.hazard("overwritten while a copy to global memory reads it")
        readers = np.where(self.read_in[cells] == self.epoch, self.readers[cells], np.uint64(0))
        others = readers & ~np.uint64(1 << access.warp)
        if np.any(others):
            mask = int(others[others != 0].flat[0])
            raise access.hazard(f"overwritten stage: no barrier since warp {mask.bit_length() - 1} read it")
        racing = (self.written[cells] == self.epoch) & (self.writer[cells] != access.warp)
        if np.any(racing):
            writer = int(self.writer[cells][racing].flat[0])
            raise access.hazard(f"overwritten with no barrier since warp {writer} wrote it")

    def _check_flight(self, access: Access, cells: np.ndarray, verb: str) -> None:
        flight = self.flight[cells]
        if np.any(flight != NOBODY):
            warp = int(flight[flight != NOBODY].flat[0])
            name, stage = self.owners[int(self.owner[cells][flight != NOBODY].flat[0])]
            raise access.hazard(f"{verb} while the copy of {name} stage {stage} that warp {warp} issued is in flight")
