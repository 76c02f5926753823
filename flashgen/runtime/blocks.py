"""Block lists: what `flashgen.block_mask` keeps of a mask, and the lists that kernels walk, made of it by their tiles.

Kept is a number for each square block of the scores, the count of its visible elements; how a kernel divides the scores
into tiles is not known yet. A tile is skipped where all the blocks that it covers are, and full where all are full: so
one object serves the forward, the backward, and any tiles. Tiles that do not match blocks may be visited, or masked,
though they need not be. Everything is made on the device by operations of the arrays' library; the host waits for
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashgen.attention.lists import KEYS, MAX_BLOCKS, MAX_GROUP, QUERIES
from flashgen.build import Stages
from flashgen.ir.expr import variables
from flashgen.runtime import launch
from flashgen.runtime.arguments import Problem, gapless
from flashgen.runtime.arrays import Library
from flashgen.runtime.bindings import runtime
from flashgen.runtime.call import Call
from flashgen.runtime.tile_counters import PER_THREAD
from flashgen.spec import Function, Spec

SKIPPED = 2**31 - 1  # behind every entry of a list
KEPT = 64  # lists of one object, of different tiles and streams


@dataclass(frozen=True)
class Request:
    """A list as a kernel takes it: its buffer, rows of queries and of keys in a tile, and the query heads that share a
    tile (of KEYS) or a key head (of QUERIES)."""

    name: str
    block_q: int
    block_kv: int
    heads: int

    @classmethod
    def of(cls, stages: Stages, problem: Problem) -> Request | None:
        """What a kernel asks for; None for one that walks no list."""
        names = {item.name for item in stages.tile.buffers} & {KEYS.name, QUERIES.name}
        if not names:
            return None
        plan, group = stages.plan, problem.heads // problem.heads_kv
        rows, columns = plan.sizes["block_q"], plan.sizes["block_kv"]
        if QUERIES.name in names:
            return cls(QUERIES.name, rows, columns, group)
        return cls(KEYS.name, rows // plan.packed, columns, plan.packed)


class BlockMask:
    """Which blocks of the scores a mask skips, shows in full, or in part; made by `flashgen.block_mask`."""

    def __init__(
        self,
        spec: Spec,
        library: Library,
        visible: Any,
        sizes: tuple[int, int, int, int],
        block_size: int,
    ) -> None:
        """visible: float32 (batch, heads, blocks of queries, blocks of keys), the visible elements of each.

        spec: `causal` and `mask` count. sizes: batch, heads, seqlen_q, seqlen_k.
        """
        self.causal = spec.causal
        self.mask: Function | None = spec.mask
        self.batch, self.heads, self.seqlen_q, self.seqlen_k = sizes
        self.block_size = block_size
        self.library = library
        self.device = library.device(visible)
        self.signature = (self.causal, self.mask, sizes, library.name, self.device)
        self._visible = visible
        self._lists: dict[tuple, Any] = {}
        self._captured: list[Any] = []

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, heads={self.heads}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}"
        return f"<flashgen block mask of {sizes}, blocks of {self.block_size}>"

    def density(self) -> float:
        """The part of the blocks that is not skipped, from 0 to 1, and 0 where there are none; waits for the device."""
        return float((self._visible > 0).sum()) / max(math.prod(self._visible.shape), 1)

    def shape(self, request: Request) -> tuple[int, int, int, int]:
        """The shape of a list."""
        tiles = -(-self.seqlen_q // request.block_q), -(-self.seqlen_k // request.block_kv)
        heads = 1 if self.heads == 1 else self.heads // request.heads
        if request.name == KEYS.name:
            return self.batch, heads, tiles[0], 1 + tiles[1]
        return self.batch, heads, tiles[1], 1 + request.heads * tiles[0]

    def check(self, spec: Spec, problem: Problem, library: Library, device: int | None) -> None:
        """ValueError for lists of another mask, other sizes or another device than those of a call."""
        if (self.causal, self.mask) != (spec.causal, spec.mask):
            raise ValueError(
                f"block_mask is of {_masks(self)} but this kernel has {_masks(spec)}; make it with the causal, window "
                "and mask_mod of the kernel, and arrays of the same types"
            )
        if spec.used and (self.causal or depends(self.mask, "seqlen_k")):
            raise ValueError(
                "block_mask is of a mask that depends on seqlen_k, which seqused_k makes another in each batch; leave "
                "block_mask out"
            )
        for name in ("seqlen_q", "seqlen_k"):
            if getattr(self, name) != getattr(problem, name):
                found, size = getattr(self, name), getattr(problem, name)
                raise ValueError(f"block_mask is made for {name} = {found} but the call has {size}; make one for that")
        for name, letter in (("batch", "b"), ("heads", "h")):
            found, size = getattr(self, name), getattr(problem, name)
            if found != size and (found != 1 or depends(self.mask, letter)):
                raise ValueError(f"block_mask is made for {name} = {found} but the call has {size}; make one for that")
        if problem.batch > launch.MAX_BLOCKS and self.batch > 1:
            raise ValueError(
                f"batch = {problem.batch} exceeds {launch.MAX_BLOCKS}, and lists are counted within a launch; split it"
            )
        if self.library is not library or self.device != device:
            raise ValueError("block_mask lies in another library or on another device than q; make it there")
        if problem.heads // problem.heads_kv > MAX_GROUP:
            group = problem.heads // problem.heads_kv
            raise ValueError(
                f"{group} heads share a key head, more than the {MAX_GROUP} of a list; leave block_mask out"
            )

    def lists(self, call: Call) -> dict[str, Any]:
        """The lists that a call walks, by the names of their buffers."""
        stream = self.library.stream(call.device) if self.device is not None else None
        return {request.name: self.list_for(request, stream) for request in call.lists}

    def requests(self, stages: Iterable[Stages], problem: Problem) -> tuple[Request, ...]:
        """What kernels ask for; of a call's, no two ask for lists of one name."""
        found = (Request.of(each, problem) for each in stages)
        return tuple(request for request in found if request is not None)

    def layout(self, request: Request) -> tuple[int, ...]:
        """Strides of a list, and the last index of each axis."""
        shape = self.shape(request)
        return (*gapless(shape), *(max(size - 1, 0) for size in shape))

    def list_for(self, request: Request, stream: int | None) -> Any:
        """The list, int32 without gaps, made once on each stream; within a capture each time, as it then belongs to the
        graph."""
        capturing = stream is not None and stream > PER_THREAD and runtime().streamIsCapturing(stream)
        key = (request, stream)
        found = None if capturing else self._lists.get(key)
        if found is None:
            found = self._made(request)
            if capturing:
                self._captured.append(found)
            else:
                if len(self._lists) >= KEPT:
                    self._lists.clear()
                self._lists[key] = found
        return found

    def _made(self, request: Request) -> Any:
        seen, full = self._tiles(request)
        xp, shared = self.library.module(), request.heads
        places = self.library.arange(seen.shape[3 if request.name == KEYS.name else 2], seen)
        if request.name == KEYS.name:
            if self.heads > 1 and shared > 1:  # a tile of several heads sees what one of them sees
                apart = (self.batch, self.heads // shared, shared, *seen.shape[2:])
                seen, full = seen.reshape(apart).sum(2) > 0, full.reshape(apart).sum(2) // shared
        else:
            seen, full = (self._by_key_head(x, shared) for x in (seen, full))
            head = self.library.arange(shared, seen).reshape(-1, 1) * MAX_BLOCKS
            places = (head + places.reshape(1, -1)).reshape(-1)
        entries = xp.where(seen, 2 * places + 1 - full, SKIPPED)
        counts = seen.sum(-1).reshape(*seen.shape[:-1], 1)
        return self.library.int32(xp.concatenate((counts, self.library.sorted(entries)), -1))

    def _by_key_head(self, flags: Any, group: int) -> Any:
        """(batch, heads, tiles of queries, tiles of keys) as (batch, key heads, tiles of keys, group * tiles of
        queries)."""
        batch, heads, rows, columns = flags.shape
        if heads == 1:
            flags = self.library.module().broadcast_to(flags, (batch, group, rows, columns))
        apart = flags.reshape(batch, max(heads // group, 1), group, rows, columns)
        ordered = apart.swapaxes(3, 4).swapaxes(2, 3)  # key head, tile of keys, head of the group, tile of queries
        return ordered.reshape(*ordered.shape[:3], group * rows)

    def _tiles(self, request: Request) -> tuple[Any, Any]:
        """Of each tile, whether anything of it is seen, a truth value, and whether all of it is, a number 0 or 1."""
        seen, full = self._visible > 0, self._visible == self.block_size**2
        counted = [1]
        inside = []
        for axis, tile, seqlen in ((-1, request.block_kv, self.seqlen_k), (-2, request.block_q, self.seqlen_q)):
            place = self.library.arange(-(-seqlen // tile), self._visible)
            first = place * tile // self.block_size
            last = ((place + 1) * tile + self.block_size - 1) // self.block_size
            last = self.library.at_most(last, self._visible.shape[axis])
            shape = (-1, 1)[:-axis]
            seen, full = (_sums(x, first, last, axis) for x in (seen, full))
            counted.append((last - first).reshape(shape))
            inside.append(((place + 1) * tile <= seqlen).reshape(shape))
        whole = (full == counted[1] * counted[2]) & inside[0] & inside[1]
        return seen > 0, self.library.int32(whole)


def _sums(x: Any, first: Any, last: Any, axis: int) -> Any:
    """Sums over [first, last) along an axis."""
    x = x + 0  # numbers, of truth values
    totals = x.cumsum(axis)
    if axis == -1:
        return totals[..., last - 1] - totals[..., first] + x[..., first]
    return totals[..., last - 1, :] - totals[..., first, :] + x[..., first, :]


def depends(mask: Function | None, name: str) -> bool:
    """True where a mask depends on its argument `name`: for "h" also on how many heads there are."""
    found = variables(mask.expr) if mask else set()
    return name in found or (name == "h" and "heads" in found)


def _masks(item: Any) -> str:
    """What hides elements, in words."""
    parts = ["causal"] * item.causal + ([f"{item.mask.name}"] if item.mask else [])
    return " and ".join(parts) or "no mask"
