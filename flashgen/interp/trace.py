"""What a machine interpreter reports: a simple model of time, and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from flashgen.ir.expr import Binary, Compare, Expr, Select, Unary, walk
from flashgen.plan.arch import Arch

ALU_RATE = 128  # float32 operations a clock a multiprocessor, on every chip of the family


@dataclass
class Trace:
    """Sums over all blocks. `clocks` by unit: each as if it worked alone, so the largest is a lower bound of the time.

    fragment_orders: for each accumulator kept in fragment order, the shape and the division among warps of the register
    tile that gave the order: every kernel that touches the accumulator must agree.
    """

    blocks: int = 0
    clocks: dict[str, float] = field(default_factory=dict)
    statements: dict[str, int] = field(default_factory=dict)
    global_bytes_read: int = 0
    global_bytes_written: int = 0
    shared_bytes: int = 0
    flops: int = 0
    fragment_orders: dict[str, tuple[tuple[int, ...], tuple[int, int]]] = field(default_factory=dict)

    @property
    def clocks_per_block(self) -> float:
        """The busiest unit's clocks for one block."""
        return max(self.clocks.values(), default=0.0) / max(self.blocks, 1)

    def spend(self, unit: str, clocks: float) -> None:
        self.clocks[unit] = self.clocks.get(unit, 0.0) + clocks

    def count(self, statement: str) -> None:
        self.statements[statement] = self.statements.get(statement, 0) + 1

    def shared(self, arch: Arch, nbytes: int) -> None:
        """Traffic between shared memory and registers or global memory."""
        self.shared_bytes += nbytes
        self.spend("shared", nbytes / arch.shared_bandwidth)

    def matrix(self, arch: Arch, multiply_adds: int) -> None:
        self.flops += 2 * multiply_adds
        self.spend("matrix", multiply_adds / arch.matrix_rate)

    def elementwise(self, arch: Arch, expr: Expr, elements: int) -> None:
        special, plain = operations(expr)
        self.spend("special", special * elements / arch.exp_rate)
        self.spend("alu", plain * elements / ALU_RATE)


@lru_cache(maxsize=4096)
def operations(expr: Expr) -> tuple[int, int]:
    """Special-function and plain operations for one element."""
    special = sum(isinstance(node, Unary) and node.op not in ("neg", "abs") for node in walk(expr))
    return special, sum(isinstance(node, Binary | Compare | Select) for node in walk(expr))
