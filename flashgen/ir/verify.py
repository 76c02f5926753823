"""The verifier of the TILE level, and checks that both levels share."""

from __future__ import annotations

from flashgen.ir.dtype import F32
from flashgen.ir.expr import Cast, variables
from flashgen.ir.nodes import (
    Accumulate,
    Copy,
    Fill,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Map,
    Note,
    RowReduce,
    Scatter,
    ScatterAdd,
    Space,
    name_of,
)
from flashgen.ir.visit import Body, statements

TILE_STATEMENTS = (For, If, Let, Note, Copy, Fill, Gemm, Map, RowReduce, Accumulate, Scatter, ScatterAdd)
RESERVED = {"i", "j", "warpgroup"}  # the element of a Map, and who executes a statement of the sm90 family


class VerifyError(ValueError):
    """The IR breaks a rule of its level: a fault of a pass, not of the user."""


def tile(kernel: Kernel) -> None:
    """Raise VerifyError unless the kernel is a well-formed TILE program."""
    check_names(kernel)
    for stmt in statements(kernel.body):
        if not isinstance(stmt, TILE_STATEMENTS):
            raise VerifyError(f"{kernel.name}: {type(stmt).__name__} is no TILE statement")
        if isinstance(stmt, Gemm):
            _check_gemm(kernel, stmt)
        if isinstance(stmt, Copy) and stmt.transpose:
            _check_transpose(kernel, stmt)
        if isinstance(stmt, Map) and isinstance(stmt.expr, Cast) != (kernel.buffer(stmt.dst).dtype != F32):
            raise VerifyError(f"{kernel.name}: {stmt.dst} must be cast to its type exactly where it is not float32")


def check_names(kernel: Kernel) -> None:
    """Every buffer is declared once, every variable is bound before its use, and registers are written before read."""
    names = [buffer.name for buffer in kernel.buffers]
    for name in names:
        if names.count(name) > 1:
            raise VerifyError(f"{kernel.name}: buffer {name} is declared twice")
    dims = {dim for buffer in kernel.buffers if buffer.space is not Space.GLOBAL for dim in buffer.shape}
    bound = {scalar.name for scalar in kernel.scalars} | {axis.name for axis in kernel.axes} | dims | RESERVED
    _check_body(kernel, kernel.body, bound, set())


def _check_body(kernel: Kernel, body: Body, bound: set[str], written: set[str]) -> None:
    declared = {buffer.name for buffer in kernel.buffers}
    for stmt in body:
        known = bound | ({stmt.axis} if isinstance(stmt, For) else set())
        for expr in stmt.expressions():
            for name in sorted(variables(expr) - bound):
                raise VerifyError(f"{kernel.name}: {name} is used before it is bound")
        for place in (*stmt.reads(), *stmt.writes()):
            if name_of(place) not in declared:
                raise VerifyError(f"{kernel.name}: {name_of(place)} is not declared")
        for place in stmt.reads():
            on_chip = kernel.space(place) is not Space.GLOBAL
            if on_chip and name_of(place) not in written:
                raise VerifyError(f"{kernel.name}: {name_of(place)} is read before it is written")
        written |= {name_of(place) for place in stmt.writes()}
        bound = bound | set(stmt.assigns())
        inner = getattr(stmt, "body", None)
        if inner is not None:
            _check_body(kernel, inner, known, written)


def _check_transpose(kernel: Kernel, stmt: Copy) -> None:
    src, dst = (kernel.buffer(name_of(place)) for place in (stmt.src, stmt.dst))
    if (src.space, dst.space) != (Space.REGISTER, Space.SHARED) or src.shape != dst.shape[::-1]:
        raise VerifyError(f"{kernel.name}: {dst.name} is no shared tile for the transpose of a register tile")


def _check_gemm(kernel: Kernel, stmt: Gemm) -> None:
    a, b, acc = (kernel.buffer(name).shape for name in (stmt.a, stmt.b, stmt.acc))
    a = a[::-1] if stmt.transpose_a else a
    b = b[::-1] if stmt.transpose_b else b
    if (a[0], stmt.columns or b[1]) != acc or a[1] != b[0]:
        raise VerifyError(f"{kernel.name}: {stmt.acc} = {a} x {b} has disagreeing shapes {acc}")
