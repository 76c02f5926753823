"""Statements of the sm90 family: tiles by TMA through mbarriers, wgmma on shared and register operands, roles of warps.

Each stage of a tile that TMA fills has two mbarriers: `full`, whose phase ends when the bytes have landed, and `empty`,
whose phase ends when every computing warp has arrived. A wait names the parity of the phase that it waits for (PTX ISA,
"mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.ir.expr import Expr, Var
from flashgen.ir.nodes import Place, Stmt, Tile, Window
from flashgen.machine.base import MachineStmt

WARPGROUP_ROWS = 64
WARPGROUP_WARPS = 4
WARPGROUP = Var("warpgroup")  # the number of the warpgroup that executes a statement
PANEL = 64  # columns that TMA writes side by side, which is also the largest part of a product's columns that moves
OWN_ROWS = "own rows"
OWN_COLUMNS = "own columns"
FIRST_COLUMNS = "first columns"


@dataclass(frozen=True)
class Sm90Stmt(MachineStmt):
    FAMILY: ClassVar[str] = "sm90"


@dataclass(frozen=True)
class InitBarriers(Sm90Stmt):
    """Every mbarrier starts its first phase: full ones expect one arrival, empty ones one of each computing warp."""

    NAME = "init_barriers"
    ORDERS = True


@dataclass(frozen=True)
class Role(Sm90Stmt):
    """The body is executed by some warps alone, each thread with `registers` registers.

    role: "producer" (one thread of the warps behind the computing ones) or "consumer" (the computing warps, or one
    warpgroup of them).
    """

    role: str
    registers: int
    body: tuple[Stmt, ...]
    warpgroup: int | None = None
    NAME = "role"


@dataclass(frozen=True)
class TmaLoad(Sm90Stmt):
    """dst = src, landing at the wait for its full barrier; zero where out of range.

    reuse: other blocks read it too, so that it should stay in the L2. beside: vectors that land in the same phase.
    """

    dst: Tile
    src: Window
    reuse: bool = False
    beside: tuple[str, ...] = ()
    NAME = "tma_load"
    NEEDS = "every computing warp has released this stage of dst"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class LoadVector(Sm90Stmt):
    """dst = src, landing with `tile`, whose load names dst as what it is beside."""

    dst: Tile
    src: Window
    tile: Tile
    NAME = "load_vector"
    NEEDS = "the load of `tile` into this stage has been issued; src is 16-byte aligned, with whole blocks of rows"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class WaitFull(Sm90Stmt):
    """Returns when the phase of this parity has ended: the load of this stage has landed.

    behind: a row vector whose value the wait is made to depend on, so that it stays behind what computes it.
    """

    tile: Tile
    parity: Expr
    behind: str = ""
    NAME = "wait_full"
    NEEDS = "a load of this stage is issued, or will be"
    ORDERS = True


@dataclass(frozen=True)
class WaitEmpty(Sm90Stmt):
    """Returns when the phase of this parity has ended: every computing warp has released this stage.

    The phase before the first counts as ended, so that the first round of loads does not wait.
    """

    tile: Tile
    parity: Expr
    NAME = "wait_empty"
    NEEDS = "every computing warp releases the stage once a round"
    ORDERS = True


@dataclass(frozen=True)
class ArriveEmpty(Sm90Stmt):
    """This warp no longer reads this stage."""

    tile: Tile
    NAME = "arrive_empty"
    NEEDS = "no product in flight reads this stage"
    ORDERS = True


@dataclass(frozen=True)
class PassOver(Sm90Stmt):
    """This warp has no use for what lands in this stage: it waits for that, and releases the stage unread.

    Without the wait a warp could release a stage twice before the others have released it once.
    """

    tile: Tile
    parity: Expr
    NAME = "pass_over"
    NEEDS = "a load of this stage is issued, or will be"
    ORDERS = True


@dataclass(frozen=True)
class HandOver(Sm90Stmt):
    """dst = src, a float32 register tile in the order of its registers, for the same threads of another warpgroup."""

    dst: Tile
    src: str
    NAME = "hand_over"
    NEEDS = "every warp of the other warpgroup has released this stage of dst"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class TakeOver(Sm90Stmt):
    """dst = src: what the same thread of another warpgroup has handed over."""

    dst: str
    src: Tile
    NAME = "take_over"
    NEEDS = "every warp of the other warpgroup has arrived, and this stage is not released"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class ReduceFragment(Sm90Stmt):
    """dst += src, in bulk and without order: each warp's part is added from its part of `through` while it goes on.

    The warp first waits until its last part has been read. dst is kept in the order of the register tile src.
    """

    dst: Window
    src: str
    through: Tile
    NAME = "reduce_fragment"
    NEEDS = "dst was zeroed by an earlier kernel; no other warp touches this warp's part of `through`"
    WRITES = ("dst", "through")
    READS = ("src",)


@dataclass(frozen=True)
class ArriveFull(Sm90Stmt):
    """This warp has written its part of this stage."""

    tile: Tile
    NAME = "arrive_full"
    NEEDS = "every lane of the warp has written its part"
    ORDERS = True


@dataclass(frozen=True)
class Wgmma(Sm90Stmt):
    """acc (+)= op(a) op(b), done at its wait: a is a shared tile or a packed register tile, b a shared tile.

    A group of its own. Until it has been waited for, nothing else may touch acc or write a register operand.
    Warpgroups divide acc by rows, or by columns. columns: of b only the first ones, as many as this dimension.
    """

    acc: str
    a: Place
    b: Tile
    transpose_b: bool = False
    accumulate: bool = False
    transpose_a: bool = False
    columns: str = ""
    NAME = "wgmma"
    NEEDS = "a and b have landed"
    WRITES = ("acc",)
    READS = ("a", "b")

    def reads(self) -> tuple[Place, ...]:
        return super().reads() + ((self.acc,) if self.accumulate else ())


@dataclass(frozen=True)
class WaitWgmma(Sm90Stmt):
    """Returns when all but this warp's `pending` newest products are done; `done` names the accumulators of these."""

    pending: int
    done: tuple[str, ...]
    NAME = "wait_wgmma"
    ORDERS = True


@dataclass(frozen=True)
class SettleNumbers(Sm90Stmt):
    """Counters keep their values, which the compiler is to know no sooner: it would compute with them ahead."""

    names: tuple[str, ...]
    NAME = "settle_numbers"
    ORDERS = True


@dataclass(frozen=True)
class ConsumerBarrier(Sm90Stmt):
    """The computing warps meet; their writes to shared memory before it are seen by all of them after it."""

    NAME = "consumer_barrier"
    ORDERS = True


@dataclass(frozen=True)
class WarpgroupBarrier(Sm90Stmt):
    """The four warps of a warpgroup meet; their writes to shared memory before it are seen by each other after it."""

    NAME = "warpgroup_barrier"
    ORDERS = True


@dataclass(frozen=True)
class FirstTurn(Sm90Stmt):
    """The first warpgroup may take the first turn: the last one passes it, before any other."""

    NAME = "first_turn"
    ORDERS = True


@dataclass(frozen=True)
class WaitTurn(Sm90Stmt):
    """Returns when the warpgroup before has passed the turn: one at a time issues its products."""

    NAME = "wait_turn"
    NEEDS = "every warpgroup takes as many turns as the others"
    ORDERS = True


@dataclass(frozen=True)
class PassTurn(Sm90Stmt):
    """The next warpgroup, behind the last one the first, may issue its products."""

    NAME = "pass_turn"
    ORDERS = True


@dataclass(frozen=True)
class Describe(Sm90Stmt):
    """Where a shared tile begins, as a wgmma descriptor has it: for the products behind it that read this tile.

    part: "" for the whole tile, as of K and V; OWN_ROWS for the rows of this warpgroup alone, as of Q; OWN_COLUMNS for
    its panels; FIRST_COLUMNS for those of V in a tile of K.
    """

    tile: Tile
    part: str = ""
    NAME = "describe"
    NEEDS = "nothing: the tile need not have landed"


@dataclass(frozen=True)
class Broadcast(Sm90Stmt):
    """A uniform integer that is loaded from memory, by one lane of each warp as far as the compiler knows."""

    name: str
    value: Expr
    NAME = "broadcast"
    NEEDS = "every lane of the warp is there"

    def assigns(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class MapColumns(Sm90Stmt):
    """dst[i, j] = expr(i, j), column by column: elements are loaded from memory for so many columns at a time."""

    dst: str
    expr: Expr
    columns: int
    NAME = "map_columns"
    NEEDS = "dst is in no product in flight"
    WRITES = ("dst",)


@dataclass(frozen=True)
class HoldColumns(Sm90Stmt):
    """dst[j] = expr(j): a number for each column, which one lane of each warp holds."""

    dst: str
    expr: Expr
    NAME = "hold_columns"
    NEEDS = "every lane of the warp is there"
    WRITES = ("dst",)


@dataclass(frozen=True)
class MapAsking(Sm90Stmt):
    """dst[i, j] = expr(i, j), column by column: what is held for a column is asked for once."""

    dst: str
    expr: Expr
    NAME = "map_asking"
    NEEDS = "every lane of the warp is there"
    WRITES = ("dst",)


@dataclass(frozen=True)
class LoadMatrix(Sm90Stmt):
    """dst = src, or its transpose, packed: each warp reads its part of a tile by 8 x 8 matrices."""

    dst: str
    src: Tile
    transposed: bool = False
    NAME = "load_matrix"
    NEEDS = "src has landed, and this stage is not released"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class IfAnyLarge(Sm90Stmt):
    """The body, where an element of src in this warp is 2 or more, or no number: a bit of its exponent says so."""

    src: str
    body: tuple[Stmt, ...]
    NAME = "if_any_large"
    NEEDS = "no element of src is negative: a sign is not looked at"
    READS = ("src",)


@dataclass(frozen=True)
class Rescore(Sm90Stmt):
    """dst = a b^T again, by each warp for its rows, at once: for scores that have been overwritten."""

    dst: str
    a: Tile
    b: Tile
    NAME = "rescore"
    NEEDS = "a and b have landed, and no product in flight writes dst"
    WRITES = ("dst",)
    READS = ("a", "b")


@dataclass(frozen=True)
class FenceStores(Sm90Stmt):
    """This warp's writes to shared memory will be seen by copies that TMA starts behind the next barrier."""

    NAME = "fence_stores"
    ORDERS = True


@dataclass(frozen=True)
class FenceReads(Sm90Stmt):
    """What this warp has read of shared memory itself has arrived, before TMA is told that it may write there.

    An arrival at an mbarrier does not wait for it: it overtook what was still to be read.
    """

    NAME = "fence_reads"
    ORDERS = True


@dataclass(frozen=True)
class TmaStore(Sm90Stmt):
    """dst = src for the 64 rows of a warpgroup, read from shared memory until WaitStored; clipped to what exists.

    Where dst has several heads, the 64 rows are those of whole heads, or whole parts of one.
    across: so many warpgroups have the same rows, and store the columns of one part each; None for all columns.
    """

    dst: Window
    src: Tile
    across: int | None = None
    NAME = "tma_store"
    NEEDS = "a barrier of the warpgroup has passed since each warp fenced its writes to src"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class WaitStored(Sm90Stmt):
    """Returns when this thread's copies to global memory have read their shared tiles."""

    NAME = "wait_stored"
    ORDERS = True


@dataclass(frozen=True)
class AskTile(Sm90Stmt):
    """The counter name = the next tile that no block has taken, by one on the device; past the last where none is left.

    A block asks once for each tile that it takes: as many questions in a launch as tiles, the last of which makes the
    counter zero again.
    """

    name: str
    NAME = "ask_tile"

    def assigns(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True)
class PublishTile(Sm90Stmt):
    """dst = what the computing warps have to know of a tile of queries: ends the phase of its full barrier."""

    dst: Tile
    values: tuple[Expr, ...]
    NAME = "publish_tile"
    NEEDS = "every computing warp has released this stage of dst"
    WRITES = ("dst",)


@dataclass(frozen=True)
class TakeTile(Sm90Stmt):
    """The counters named get their part of what the producer has published in src; "" for a part that is not taken."""

    src: Tile
    names: tuple[str, ...]
    NAME = "take_tile"
    NEEDS = "the place has been waited for, and its stage is not released"
    READS = ("src",)

    def assigns(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name)
