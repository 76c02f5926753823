"""Statements of the sm80 family: mma.sync on register fragments, cp.async into shared memory.

A cp.async lands at some time before its group has been waited for by the thread that issued it; other threads see it
after a barrier that follows that wait (PTX ISA, "cp.async" and "cp.async.wait_group").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashgen.ir.nodes import Place, Tile, Window
from flashgen.machine.base import MachineStmt


@dataclass(frozen=True)
class Sm80Stmt(MachineStmt):
    """Base: ASYNCHRONOUS where what is written lands later, when its group has been waited for."""

    FAMILY: ClassVar[str] = "sm80"
    ASYNCHRONOUS: ClassVar[bool] = False


@dataclass(frozen=True)
class CopyTileAsync(Sm80Stmt):
    """dst = src, landing at its wait: 16-byte pieces divided over all threads; zero where out of range."""

    dst: Tile
    src: Window
    NAME = "copy_tile_async"
    NEEDS = "no thread still reads this stage of dst: a barrier has passed since its last reader"
    ASYNCHRONOUS = True
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class CopyTileElements(Sm80Stmt):
    """dst = src for rows that are not 16-byte aligned: element loads, stored at once; zero where out of range."""

    dst: Tile
    src: Window
    NAME = "copy_tile_elements"
    NEEDS = "no thread still reads this stage of dst: a barrier has passed since its last reader"
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class CopyVectorAsync(Sm80Stmt):
    """dst[r] = src[r], landing at its wait: float32 rows, one a thread; zero where out of range."""

    dst: Tile
    src: Window
    NAME = "copy_vector_async"
    NEEDS = "no thread still reads this stage of dst: a barrier has passed since its last reader"
    ASYNCHRONOUS = True
    WRITES = ("dst",)
    READS = ("src",)


@dataclass(frozen=True)
class CommitGroup(Sm80Stmt):
    """The asynchronous copies issued by this thread since the last commit form a group (which may be empty)."""

    NAME = "commit_group"
    ORDERS = True


@dataclass(frozen=True)
class WaitGroup(Sm80Stmt):
    """Returns when at most `pending` of this thread's newest groups have not landed."""

    pending: int
    NAME = "wait_group"
    ORDERS = True


@dataclass(frozen=True)
class MmaSync(Sm80Stmt):
    """acc (+)= op(a) op(b): a is a shared tile or a packed register tile, b a shared tile; fp32 accumulation.

    columns: of b only the first ones, as many as this dimension.
    """

    acc: str
    a: Place
    b: Tile
    transpose_a: bool = False
    transpose_b: bool = False
    accumulate: bool = False
    columns: str = ""
    NAME = "mma_sync"
    NEEDS = "a and b have landed and a barrier has passed"
    WRITES = ("acc",)
    READS = ("a", "b")

    def reads(self) -> tuple[Place, ...]:
        return super().reads() + ((self.acc,) if self.accumulate else ())
