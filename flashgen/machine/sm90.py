"""Statements of the sm90 family: tiles by TMA through mbarriers, wgmma on shared and register operands, roles of warps.

Each stage of a tile that TMA fills has two mbarriers: `full`, whose phase ends when the bytes have landed, and `empty`,
whose phase ends when every computing warp has arrived. A wait names the parity of the phase that it waits for (PTX ISA,
"mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.ir.expr import Expr
from flashgen.ir.nodes import Kernel, Place, Stmt, Tile, Window
from flashgen.ir.visit import statements
from flashgen.machine.base import MachineStmt


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

    role: "producer" (one thread of the warps behind the computing ones) or "consumer" (the computing warps).
    """

    role: str
    registers: int
    body: tuple[Stmt, ...]
    NAME = "role"


@dataclass(frozen=True)
class TmaLoad(Sm90Stmt):
    """dst = src, landing at the wait for its full barrier; zero where out of range."""

    dst: Tile
    src: Window
    NAME = "tma_load"
    NEEDS = "every computing warp has released this stage of dst"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class WaitFull(Sm90Stmt):
    """Returns when the phase of this parity has ended: the load of this stage has landed."""

    tile: Tile
    parity: Expr
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
class Wgmma(Sm90Stmt):
    """acc (+)= a op(b), done at its wait: a is a shared tile or a packed register tile, b a shared tile.

    A group of its own. Until it has been waited for, nothing else may touch acc or write a register operand.
    """

    acc: str
    a: Place
    b: Tile
    transpose_b: bool = False
    accumulate: bool = False
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
class ConsumerBarrier(Sm90Stmt):
    """The computing warps meet; their writes to shared memory before it are seen by all of them after it."""

    NAME = "consumer_barrier"
    ORDERS = True


def mapped(kernel: Kernel) -> set[str]:
    """Global arrays that TMA reads: the kernel takes a tensor map for each instead of an address and strides."""
    return {stmt.src.buffer for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad)}


def target_of(kernel: Kernel, array: str) -> str:
    """The shared tile that TMA fills from a global array."""
    loads = [stmt for stmt in statements(kernel.body) if isinstance(stmt, TmaLoad)]
    return next(stmt.dst.buffer for stmt in loads if stmt.src.buffer == array)
