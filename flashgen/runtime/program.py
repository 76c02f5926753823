"""A compiled kernel with the layout of its arguments: binding sizes and strides once, launching with addresses."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import itemgetter

from flashgen.attention import dropout
from flashgen.attention.lengths import USED, batch_rows
from flashgen.build import Stages
from flashgen.ir.dtype import I32
from flashgen.ir.expr import evaluate
from flashgen.ir.nodes import Buffer, Space
from flashgen.machine.sm90_facts import box, mapped
from flashgen.runtime import launch, tile_counters, tiles
from flashgen.runtime.compile import Cubin, nvrtc
from flashgen.runtime.dropping import LAYOUT, Drop
from flashgen.runtime.launch import MAX_BLOCKS, Launcher
from flashgen.runtime.tensormap import ALIGNMENT, MAP_BYTES, TensorMap, through_batches

Strides = Sequence[int]
ADDRESS = struct.Struct("<Q")
MAX_TILES = 2**31 - 2**16
KEPT = 64  # packed arguments of one bound program: an allocator gives the same few addresses again


class Program:
    """One kernel, compiled at first use. `tensors` are the names of its global arrays in the order of the arguments."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.name = stages.tile.name
        self.buffers = [item for item in stages.machine.buffers if item.space is Space.GLOBAL]
        self.tensors = [item.name for item in self.buffers if item.shape]
        self.mapped = mapped(stages.machine)
        scalars = {item.name for item in stages.machine.scalars}
        self._counted = {name for name in self.mapped if batch_rows(name) in scalars}
        self._lock = threading.Lock()

    @cached_property
    def cubin(self) -> Cubin:
        """The cubin, from the disk cache or NVRTC."""
        with self._lock:
            return self.__dict__.get("cubin") or nvrtc(self.stages.source, self.stages.plan.arch.target)

    @cached_property
    def launcher(self) -> Launcher:
        plan = self.stages.plan
        return Launcher(self.cubin, plan.threads, plan.shared_bytes)

    def bind(self, strides: Mapping[str, Strides], scalars: Mapping[str, int | float]) -> Bound:
        """The arguments but for the addresses, and the grid.

        strides: (batch, head, row) or (batch, head); of what is read by element one for each axis, then its last index.
        """
        data = bytearray()
        offsets: list[int] = []
        for item in self.buffers:
            if item.name in self.mapped:
                data += bytes(-len(data) % ALIGNMENT)  # as the compiler lays out the struct
            offsets.append(len(data))
            data += self._without_address(item, strides)
        sizes = {**self.stages.plan.sizes, **scalars}
        late = None
        for scalar in self.stages.machine.scalars:
            if scalar in dropout.SCALARS:  # each call has its own
                late = late or len(data)
                data += bytes(4)
                continue
            data += struct.pack("<i" if scalar.dtype == I32 else "<f", scalars[scalar.name])
        extents = [int(evaluate(axis.extent, sizes)) for axis in self.stages.machine.axes]
        self._check_tiles(sizes)
        maps = {
            index: self._map(item, strides[item.name], scalars)
            for index, item in enumerate(self.buffers)
            if item.name in self.mapped
        }
        batch_bytes = [
            0
            if (item.of_any_size or item.by_element) and item.name != USED
            else strides[item.name][0] * item.dtype.bytes
            for item in self.buffers
            if item.shape
        ]
        template = data + bytes(-len(data) % (ALIGNMENT if self.mapped else 8))
        x, y, z, *_ = (*extents, 1, 1)
        if y > MAX_BLOCKS:
            axis = self.stages.machine.axes[1].name
            raise ValueError(f"{axis} has {y} places, more than the {MAX_BLOCKS} of a grid; split the sequence")
        return Bound(self, template, offsets, maps, batch_bytes, (x, y, z), late)

    def _without_address(self, item: Buffer, strides: Mapping[str, Strides]) -> bytes:
        """One array's place in the arguments: room for a map or an address, and strides."""
        if item.name in self.mapped:
            return bytes(MAP_BYTES)
        if not item.shape:
            return ADDRESS.pack(0)
        if item.by_element:
            return struct.pack(f"<{1 + 2 * len(item.shape)}q", 0, *strides[item.name])
        count = len(item.shape) - 1 if len(item.shape) == 4 else 2
        return struct.pack(f"<{1 + count}q", 0, *strides[item.name][:count])

    def _check_tiles(self, sizes: Mapping[str, int | float]) -> None:
        """Tiles of a persistent grid are numbered by 32-bit integers, and have heads of one key head.

        Raises ValueError where there are too many, or heads of several.
        """
        packed = self.stages.plan.packed
        if sizes["group"] % packed:
            raise ValueError(f"groups of {sizes['group']} heads are no multiple of the {packed} of a tile")
        if not self.stages.plan.persistent:
            return
        tiles = math.prod(int(evaluate(axis.extent, sizes)) for axis in self.stages.tile.axes)
        if tiles >= MAX_TILES:
            raise ValueError(f"{tiles} tiles of queries exceed the {MAX_TILES} of one launch; split the batch")

    def _map(self, item: Buffer, strides: Strides, scalars: Mapping[str, int | float]) -> TensorMap:
        """How TMA sees an array of (batch, head, row, column): a box is 64 columns of some rows of some heads."""
        block = (64, *box(self.stages.machine, item.name, self.stages.plan.sizes))
        if item.of_any_size:
            return tiles.tensor_map(item.dtype.name, tuple(strides), block)
        batches, heads, rows, cols = (int(scalars[dim]) for dim in item.shape)
        if item.name in self._counted:  # padded batches, whose rows are counted through all of them
            through = through_batches(strides, batches, rows)
            assert through is not None, "a call of such batches takes the portable kernels"
            return TensorMap.of_sequences(item.dtype.name, (cols, batches * rows, heads), through[0], strides[1], block)
        if item.shape[0] == "one":  # packed sequences
            return TensorMap.of_sequences(item.dtype.name, (cols, rows, heads), strides[2], strides[1], block)
        return TensorMap(item.dtype.name, (cols, rows, heads, batches), tuple(reversed(strides[:3])), block)


def _divided(blocks: int, heads: int, batches: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """The first batch of each launch, and its grid."""
    if blocks and heads:
        for first in range(0, batches, MAX_BLOCKS):
            yield first, (blocks, heads, min(batches - first, MAX_BLOCKS))


class Bound:
    """A program with everything bound but addresses.

    offsets: where in the arguments the address of each tensor stands, or its tensor map, for those of `maps`; behind
    them that of the counter from which blocks take their tiles, where the kernel has one.
    batch_bytes: from batch to batch of each tensor. late: where the scalars of dropout stand, in kernels that drop.
    """

    def __init__(
        self,
        program: Program,
        template: bytearray,
        offsets: list[int],
        maps: dict[int, TensorMap],
        batch_bytes: list[int],
        grid: tuple[int, int, int],
        late: int | None = None,
    ) -> None:
        self.program = program
        self.template = template
        self.offsets = offsets[: len(batch_bytes)]
        self.counter = offsets[-1] if len(offsets) > len(batch_bytes) else None
        self.maps = maps
        self.batch_bytes = batch_bytes
        self.grid = grid
        self.late = late
        self.launches = list(_divided(*grid))
        self.arguments = itemgetter(*program.tensors)  # of arrays by name, in the order of the addresses
        self._args = lru_cache(KEPT)(self._packed)

    def launch(self, pointers: tuple[int, ...], stream: int, device: int, drop: Drop | None = None) -> None:
        """Launch with the addresses of the tensors, in their order; a grid without blocks is no launch."""
        if launch.context_device() == device:
            self._launch(pointers, stream, device, drop)
        elif self.launches:  # counters and tensor maps need the context, not the launch alone
            with launch.current(device):
                self._launch(pointers, stream, device, drop)

    def _launch(self, pointers: tuple[int, ...], stream: int, device: int, drop: Drop | None) -> None:
        """Launch on the device, which is current."""
        for first, grid in self.launches:
            counter = 0 if self.counter is None else tile_counters.address(stream, device)
            self.program.launcher.launch_here(grid, self._args(pointers, counter, first, drop), stream, device)

    def _packed(self, pointers: tuple[int, ...], counter: int, first: int, drop: Drop | None) -> bytes:
        """The struct of arguments from batch `first` on."""
        args = bytearray(self.template)
        if self.late is not None:
            assert drop is not None
            args[self.late : self.late + LAYOUT.size] = drop.packed()
        if self.counter is not None:
            ADDRESS.pack_into(args, self.counter, counter)
        for index, (offset, pointer) in enumerate(zip(self.offsets, pointers, strict=True)):
            address = pointer + first * self.batch_bytes[index]
            if index in self.maps:
                args[offset : offset + MAP_BYTES] = self.maps[index].at(address)
            else:
                ADDRESS.pack_into(args, offset, address)
        return bytes(args)
