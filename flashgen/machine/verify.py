"""The verifier of the MACHINE level."""

from __future__ import annotations

from flashgen.ir.nodes import For, If, Kernel, Let, Level, Note, Space
from flashgen.ir.verify import VerifyError, check_names
from flashgen.ir.visit import heads_in_tile, statements
from flashgen.machine.base import MachineStmt, ReduceRows
from flashgen.machine.sm80 import MmaSync
from flashgen.machine.sm80_hazards import hazards
from flashgen.machine.sm90 import PANEL, Wgmma
from flashgen.machine.sm90_facts import box, mapped
from flashgen.plan.plan import Plan


def machine(kernel: Kernel, plan: Plan) -> None:
    """Raise VerifyError unless the kernel is a hazard-free MACHINE program whose tiles fit its instructions."""
    if kernel.level is not Level.MACHINE:
        raise VerifyError(f"{kernel.name}: still at the {kernel.level.name} level")
    check_names(kernel)
    for stmt in statements(kernel.body):
        if not isinstance(stmt, MachineStmt | For | If | Let | Note):
            raise VerifyError(f"{kernel.name}: {type(stmt).__name__} was not selected")
        if isinstance(stmt, MmaSync):
            _check_product(kernel, plan, stmt)
        if isinstance(stmt, Wgmma):
            _check_wgmma(kernel, plan, stmt)
        if isinstance(stmt, ReduceRows) and kernel.buffer(stmt.src).warps[1] != 1:  # type: ignore[index]
            raise VerifyError(f"{kernel.name}: rows of {stmt.src} are spread over several warps; a row needs one")
    if plan.arch.family == "sm80":
        if heads_in_tile(kernel) > 1:
            raise VerifyError(f"{kernel.name}: heads share a tile, which no sm80 statement copies")
        for hazard in hazards(kernel, plan):
            raise VerifyError(f"{kernel.name}: {hazard}")
    for array in sorted(mapped(kernel)):
        box(kernel, array, plan.sizes)


def _check_wgmma(kernel: Kernel, plan: Plan, stmt: Wgmma) -> None:
    """Shapes agree, a warpgroup has 64 rows, and the width is one of the instruction's."""
    sizes = plan.sizes
    acc, a, b = kernel.buffer(stmt.acc), kernel.buffer(_buffer(stmt.a)), kernel.buffer(stmt.b.buffer)
    a_shape = a.shape[::-1] if stmt.transpose_a else a.shape
    b_shape = b.shape[::-1] if stmt.transpose_b else b.shape
    if (a_shape[0], stmt.columns or b_shape[1]) != acc.shape or a_shape[1] != b_shape[0]:
        raise VerifyError(f"{kernel.name}: {stmt.acc} = {a_shape} x {b_shape} has disagreeing shapes")
    rows, cols = (sizes[dim] for dim in acc.shape)
    assert acc.warps is not None
    down, across = acc.warps
    if rows * 4 != 64 * down or cols % (8 * across) or cols > 256 * across or sizes[a_shape[1]] % 16:
        raise VerifyError(
            f"{kernel.name}: {stmt.acc} of {rows} x {cols} is not 64 rows a warpgroup by 8 to 256 columns"
        )
    if across > 1 and cols % (PANEL * across):
        raise VerifyError(
            f"{kernel.name}: warpgroups divide the {cols} columns of {stmt.acc} by whole panels of {PANEL}"
        )
    if isinstance(stmt.a, str) and (stmt.transpose_a or a.warps != (down, 1)):
        raise VerifyError(f"{kernel.name}: {stmt.a} in registers has the rows of its warpgroup, as they are")


def _check_product(kernel: Kernel, plan: Plan, stmt: MmaSync) -> None:
    """Shapes agree, and each warp's part is a whole number of matrix instructions."""
    m, n, k = plan.arch.mma
    sizes = plan.sizes
    acc = kernel.buffer(stmt.acc)
    rows, cols = (sizes[dim] for dim in acc.shape)
    assert acc.warps is not None
    if rows % (m * acc.warps[0]) or cols % (n * acc.warps[1]):
        raise VerifyError(
            f"{kernel.name}: {stmt.acc} {rows} x {cols} is no multiple of {m} x {n} for each of its warps"
        )
    a, b = kernel.buffer(_buffer(stmt.a)), kernel.buffer(stmt.b.buffer)
    a_shape = a.shape[::-1] if stmt.transpose_a else a.shape
    b_shape = b.shape[::-1] if stmt.transpose_b else b.shape
    if (a_shape[0], stmt.columns or b_shape[1]) != acc.shape or a_shape[1] != b_shape[0]:
        raise VerifyError(f"{kernel.name}: {stmt.acc} = {a_shape} x {b_shape} has disagreeing shapes")
    if sizes[a_shape[1]] % k:
        raise VerifyError(f"{kernel.name}: {a_shape[1]} = {sizes[a_shape[1]]} is no multiple of the instruction's {k}")
    if a.space is Space.REGISTER and a.warps != (acc.warps[0], 1):
        raise VerifyError(f"{kernel.name}: operand {a.name} is divided among the warps otherwise than {acc.name}")


def _buffer(place) -> str:
    return place if isinstance(place, str) else place.buffer
