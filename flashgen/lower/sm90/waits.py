"""Waits and arrivals: for tiles by TMA, for products, and for what leaves through shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flashgen.ir.expr import variables
from flashgen.ir.graph import access
from flashgen.ir.nodes import For, If, Kernel, Stmt, Tile
from flashgen.ir.visit import Body, lets_at, rewrite_kernel, statements
from flashgen.lower.sm90.overlap import FIRST, at_step
from flashgen.lower.sm90.roles import behind_lets, for_each_tile, in_role, within
from flashgen.lower.sm90.stages import DONE, goes_round, parity
from flashgen.machine.base import Assign, StoreFragment, WhileLoop
from flashgen.machine.sm90 import (
    ArriveEmpty,
    ArriveFull,
    ConsumerBarrier,
    FenceReads,
    FenceStores,
    HandOver,
    IfAnyLarge,
    LoadMatrix,
    TakeOver,
    TmaLoad,
    TmaStore,
    WaitEmpty,
    WaitFull,
    WaitStored,
    WaitWgmma,
    WarpgroupBarrier,
    Wgmma,
)
from flashgen.plan.plan import Plan

OUTPUT = Tile("o_tile")
NESTED = (For, If, WhileLoop, IfAnyLarge)


def guard_loads(kernel: Kernel, plan: Plan) -> Kernel:
    """Wait for a stage to be empty before it is loaded; loads into what O lies over wait until O has left.

    Invariant: each wait names the parity of the phase that belongs to its load.
    """
    covered = set(plan.covered_by_output) if plan.persistent else set()

    def guarded(body: Body) -> Body:
        result: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, For) and covered & {load.dst.buffer for load in _loads(stmt.body)}:
                result.append(If(stmt.start < stmt.stop, guarded(_first_step(stmt, covered))))
                stmt = replace(stmt, start=stmt.start + 1)
            if isinstance(stmt, TmaLoad) and goes_round(kernel, stmt.dst):
                result.append(WaitEmpty(stmt.dst, (parity(stmt.dst) + 1) % 2))
            result += within((stmt,), guarded)
        return tuple(result)

    return in_role(kernel, "producer", guarded)


def _loads(body: Body) -> list[TmaLoad]:
    return [stmt for stmt in body if isinstance(stmt, TmaLoad)]


def _first_step(loop: For, covered: set[str]) -> Body:
    """The loads of a loop's first step, with a wait for O to have left before the first that it lies over."""
    listed, _ = lets_at(loop, loop.start, FIRST)
    loads = tuple(at_step(loop, load, loop.start) for load in _loads(loop.body))
    first = next(at for at, load in enumerate(_loads(loop.body)) if load.dst.buffer in covered)
    wait = WaitEmpty(OUTPUT, (DONE + 1) % 2, note="the O of the last tile has left this memory")
    return (*listed, *loads[:first], wait, *loads[first:])


def guard_reads(kernel: Kernel, plan: Plan) -> Kernel:
    """Wait for a tile to have landed before it is first read, at the place where its load is known to be due.

    Invariant: each wait names the parity of the phase that belongs to its load.
    """

    def change(body: Body) -> Body:
        result: list[Stmt] = []
        seen: set[Tile] = set()
        awaited = {stmt.tile for stmt in body if isinstance(stmt, WaitFull)}
        for stmt in within(body, change):  # what is done again has been waited for
            if isinstance(stmt, Wgmma | LoadMatrix):
                places = [place for place in stmt.reads() if isinstance(place, Tile) and place.buffer in loaded]
                # what is waited for further down for another product's sake has not landed before this one
                tiles = [place for place in places if place.buffer not in known or place in awaited]
                result += [WaitFull(tile, parity(tile)) for tile in tiles if tile not in seen]
                seen |= set(tiles)
            result.append(stmt)
        return tuple(result)

    def for_a_tile(body: Body) -> Body:
        """What is loaded once for a tile of queries is waited for even where no step reads it."""
        read = {name for stmt in body for name in access(stmt).reads}
        waits = (WaitFull(tile, parity(tile)) for name, tile in once.items() if name in read)
        return behind_lets(change(body), tuple(waits))

    once, loaded = _loaded_once(kernel), _loaded(kernel)
    known = {stmt.tile.buffer for stmt in statements(kernel.body) if isinstance(stmt, WaitFull)} | set(once)
    return in_role(kernel, "consumer", lambda body: for_each_tile(body, for_a_tile))


def _loaded(kernel: Kernel) -> set[str]:
    """Tiles that TMA fills."""
    return {stmt.dst.buffer for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad)}


def _loaded_once(kernel: Kernel) -> dict[str, Tile]:
    """Tiles that no loop over blocks loads, with their place."""
    every = [stmt.dst for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad)]
    looped = {
        load.dst.buffer for stmt in statements(kernel.body) if isinstance(stmt, For) for load in _loads(stmt.body)
    }
    return {tile.buffer: tile for tile in every if tile.buffer not in looped}


def wait_products(kernel: Kernel, plan: Plan) -> Kernel:
    """Wait for a product before its accumulator is used or its register operand is overwritten; then release its tiles.

    Invariant: no statement touches what a product in flight reads from registers or writes.
    """
    returned = {name for name in _loaded(kernel) if name not in _loaded_once(kernel)}
    later = _read_later(kernel)
    return in_role(kernel, "consumer", lambda body: _waited(kernel, body, returned, later))


def _read_later(kernel: Kernel) -> set[Tile]:
    """Tiles of products that another one, of the next step, reads once more: that one releases them."""
    products = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Wgmma)]
    last = {tile for stmt in products if stmt.accumulate for tile in _tiles(stmt)}
    first = {tile for stmt in products if not stmt.accumulate for tile in _tiles(stmt)} - last
    return {tile for tile in first if tile.buffer in {other.buffer for other in last}}


def _waited(kernel: Kernel, body: Body, returned: set[str], later: set[Tile]) -> Body:
    """The body with its waits; `returned` are the tiles whose stages the loads take again."""
    result: list[Stmt] = []
    flying: list[Wgmma] = []

    def finish(count: int) -> None:
        if not count:
            return
        done = flying[:count]
        del flying[:count]
        result.append(WaitWgmma(len(flying), tuple(dict.fromkeys(stmt.acc for stmt in done))))
        tiles = [tile for stmt in done for tile in _tiles(stmt) if tile not in later]
        held.update(dict.fromkeys(tile for tile in tiles if tile.buffer in returned and goes_round(kernel, tile)))

    def release(rest: Body) -> None:
        """What no later statement of the body reads, and no product in flight; nor the vectors that came with it."""
        for tile in list(held):
            if not any(_reads(stmt, tile, beside.get(tile.buffer, ())) for stmt in (*rest, *flying)):
                del held[tile]
                result.extend((FenceReads(), ArriveEmpty(tile)) if tile in matrices else (ArriveEmpty(tile),))

    held: dict[Tile, None] = {}
    matrices: set[Tile] = set()
    beside = {stmt.dst.buffer: stmt.beside for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad)}
    for at, stmt in enumerate(body):
        if isinstance(stmt, NESTED):
            finish(len(flying) if isinstance(stmt, For | WhileLoop) else _conflicts(stmt, flying))
            own = set() if isinstance(stmt, IfAnyLarge) else returned  # behind what may be done again they are released
            stmt = replace(stmt, body=_waited(kernel, stmt.body, own, later))  # type: ignore[attr-defined, call-arg]
        elif isinstance(stmt, Assign) and stmt.name in _counted(held, flying):
            finish(len(flying))  # a stage has its name only until the counter goes on
            release(())
        elif isinstance(stmt, Wgmma):
            finish(0 if stmt.accumulate else _conflicts(stmt, flying))
            flying.append(stmt)
        else:
            finish(_conflicts(stmt, flying))
        release(body[at:])
        result.append(stmt)
        if isinstance(stmt, LoadMatrix) and stmt.src.buffer in returned:
            held[stmt.src] = None
            matrices.add(stmt.src)
    finish(len(flying))
    release(())
    return tuple(result)


def _counted(held: Iterable[Tile], flying: list[Wgmma]) -> set[str]:
    """The integers in the stages of tiles that are still to be released."""
    tiles = [*held, *(tile for product in flying for tile in _tiles(product))]
    return {name for tile in tiles for name in variables(tile.stage)}


def _reads(stmt: Stmt, tile: Tile, beside: tuple[str, ...]) -> bool:
    return any(tile in inner.reads() or set(beside) & set(inner.reads()) for inner in statements((stmt,)))


def _conflicts(stmt: Stmt, flying: list[Wgmma]) -> int:
    """How many of the products in flight have to be done before a statement."""
    touched = access(stmt)
    count = 0
    for position, product in enumerate(flying):
        operand = {product.a} if isinstance(product.a, str) else set()
        if product.acc in touched.reads | touched.writes or operand & touched.writes:
            count = position + 1
    return count


def release_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """In a persistent grid, release what is loaded once for a tile of queries behind the last product that reads it.

    Invariant: the next load of such a tile waits for this.
    """

    once = [tile for tile in _loaded_once(kernel).values() if goes_round(kernel, tile)]

    def change(body: Body) -> Body:
        result = list(body)
        for tile in once:
            last = max(at for at, stmt in enumerate(result) if tile.buffer in access(stmt).reads)
            result.insert(last + 1, ArriveEmpty(tile))
        return tuple(result)

    return in_role(kernel, "consumer", lambda body: for_each_tile(body, change))


def guard_output(kernel: Kernel, plan: Plan) -> Kernel:
    """Barriers and waits around the tile through which O leaves: written by a warpgroup, read by TMA.

    Invariant: the tile is written when nobody reads those bytes any more, and read by TMA when every warp of the
    warpgroup has fenced what it wrote.
    """
    covers = bool(plan.covered_by_output)
    meet = WarpgroupBarrier if plan.has("divided") else ConsumerBarrier
    leaving = {stmt.src.buffer for stmt in statements(kernel.body) if isinstance(stmt, TmaStore)}

    def change(body: Body) -> Body:
        result: list[Stmt] = []
        for stmt in body:
            leaves = isinstance(stmt, StoreFragment) and stmt.dst.buffer in leaving
            if leaves and covers:
                result.append(meet(note="every warp is done with the tiles that this one lies over"))
            elif leaves and plan.persistent:
                result += [WaitStored(note="the O of the last tile has left"), WarpgroupBarrier()]
            result.append(stmt)
            if leaves:
                result += [FenceStores(), WarpgroupBarrier()]
            if isinstance(stmt, TmaStore) and covers and plan.persistent:
                result += [WaitStored(), ArriveEmpty(OUTPUT)]
        return tuple(result)

    last = () if covers and plan.persistent else (WaitStored(note="shared memory outlives the copies from it"),)
    return in_role(kernel, "consumer", lambda body: (*for_each_tile(body, change), *last))


def guard_exchange(kernel: Kernel, plan: Plan) -> Kernel:
    """A barrier ahead of the product that reads a tile which all warps have stored.

    Two stages are enough for one barrier a step: who stores into a stage again has met, since, with those who have
    waited for the products that read it.
    Invariant: such a tile is read behind a barrier, and every warp has fenced what it wrote.
    """
    stored = {stmt.dst.buffer for stmt in statements(kernel.body) if isinstance(stmt, StoreFragment)}

    def change(stmt: Stmt) -> Stmt | Body:
        exchanged = [tile.buffer for tile in _tiles(stmt) if tile.buffer in stored] if isinstance(stmt, Wgmma) else []
        if not exchanged:
            return stmt
        if kernel.buffer(exchanged[0]).stages < 2:
            raise ValueError(f"{exchanged[0]} goes from warp to warp: it needs two stages")
        return FenceStores(), ConsumerBarrier(note=f"{exchanged[0]} is whole"), stmt

    return rewrite_kernel(kernel, change)


def guard_handovers(kernel: Kernel, plan: Plan) -> Kernel:
    """Waits and arrivals around what one warpgroup hands over to another.

    Invariant: a stage is written when every warp has taken what was in it, and read when every warp has written.
    """

    def change(stmt: Stmt) -> Stmt | Body:
        match stmt:
            case HandOver(dst=tile):
                return WaitEmpty(tile, (parity(tile) + 1) % 2), stmt, ArriveFull(tile)
            case TakeOver(src=tile):
                return WaitFull(tile, parity(tile)), stmt, ArriveEmpty(tile)
        return stmt

    return rewrite_kernel(kernel, change)


def _tiles(stmt: Stmt) -> list[Tile]:
    return [place for place in stmt.reads() if isinstance(place, Tile)]


def keep_in_cache(kernel: Kernel, plan: Plan) -> Kernel:
    """Tiles that other blocks read too are loaded so that they stay in the L2; the others leave it first.

    Invariant: none; a hint.
    """
    once = {*_loaded_once(kernel), *_read_as_matrices(kernel)}

    def change(stmt: Stmt) -> Stmt:
        return replace(stmt, reuse=stmt.dst.buffer not in once) if isinstance(stmt, TmaLoad) else stmt

    return rewrite_kernel(kernel, change)


def _read_as_matrices(kernel: Kernel) -> set[str]:
    """Tiles of what differs by query and key: no other block of the head reads them."""
    return {stmt.src.buffer for stmt in statements(kernel.body) if isinstance(stmt, LoadMatrix)}
