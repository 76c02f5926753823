"""Row sums are combined after the loop, but only where the sum is linear."""

import pytest
from staged_kernels import ALL, the_loop

from flashgen.ir.dtype import F32
from flashgen.ir.expr import Const, I, J, Var, load
from flashgen.ir.nodes import Buffer, For, If, Kernel, Level, Space
from flashgen.lower import reduction
from flashgen.machine.base import CombineLanes, FillFragment, MapFragment, ReduceRows

ZERO = FillFragment("l", Const(0.0))


def sums(*inside, before=(ZERO,)):
    shape = ("rows", "cols")
    buffers = [Buffer(name, shape, F32, Space.REGISTER, warps=(1, 1)) for name in ("p", "q")]
    buffers += [Buffer(name, shape[:1], F32, Space.REGISTER, warps=(1, 1)) for name in ("l", "scale", "m")]
    total = (ReduceRows("l", "sum", "p"), CombineLanes("l", "sum"))
    body = (*before, For("k", Const(0), Const(4), (*inside, *total)), MapFragment("m", load("l", I)))
    return Kernel("sums", Level.MACHINE, (), (), tuple(buffers), body)


def combines(kernel):
    """Where row sums are combined: inside the loop, after it."""
    return sum(isinstance(stmt, CombineLanes) for stmt in the_loop(kernel).body), sum(
        isinstance(stmt, CombineLanes) for stmt in kernel.body
    )


SCALED = MapFragment("l", load("l", I) * load("scale", I))


@pytest.mark.parametrize(
    ("kernel", "after"),
    [
        (sums(), True),
        (sums(SCALED), True),
        (sums(If(Var("k") < 2, (SCALED,))), True),
        (sums(MapFragment("l", load("l", I) + load("scale", I))), False),  # would be added once a lane
        (sums(MapFragment("l", load("l", I) * load("l", I))), False),
        (sums(MapFragment("l", load("scale", I) - load("l", I))), False),
        (sums(MapFragment("l", load("m", I))), False),
        (sums(MapFragment("m", load("l", I))), False),  # read in the loop
        (sums(If(Var("k") < 2, (MapFragment("q", load("p", I, J) / load("l", I)),))), False),
        (sums(FillFragment("l", Const(1.0))), False),
        (sums(before=(FillFragment("l", Const(1.0)),)), False),
        (sums(before=(ZERO, MapFragment("l", load("scale", I)))), False),
        (sums(before=()), False),
    ],
)
def test_combine_after_the_loop_only_where_the_sum_is_linear(kernel, after):
    result = reduction.combine_after_loop(kernel, None)
    assert combines(kernel) == (1, 0)
    assert combines(result) == ((0, 1) if after else (1, 0))
    if after:
        loop_at = result.body.index(the_loop(result))
        assert isinstance(result.body[loop_at + 1], CombineLanes), "right after the loop, before any reader"
    else:
        assert result == kernel


def test_a_maximum_is_combined_in_every_step():
    machine = ALL["attention_forward"].machine
    inside = [stmt.op for stmt in the_loop(machine).body if isinstance(stmt, CombineLanes)]
    assert inside == ["max"] and [s.op for s in machine.body if isinstance(s, CombineLanes)] == ["sum"]
