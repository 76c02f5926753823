"""Statements say what they touch, kernels find and replace their buffers."""

from dataclasses import replace

import pytest
from ir_kernels import kernel_of, matrix

from flashgen.ir.expr import Const, I, J, Var, load
from flashgen.ir.nodes import Copy, RowReduce, Tile, Window
from flashgen.machine.base import MapFragment
from flashgen.machine.sm80 import MmaSync


def test_reads_and_writes_come_from_fields_and_expressions():
    stmt = MapFragment("x", load("y", I, J) * load("v", I) + load("y", I, J))
    assert (stmt.writes(), stmt.reads()) == (("x",), ("y", "v"))
    product = MmaSync("x", Tile("t"), Tile("t", Var("s")), accumulate=True)
    assert product.writes() == ("x",) and product.reads() == (Tile("t"), Tile("t", Var("s")), "x")
    assert "x" not in replace(product, accumulate=False).reads()
    assert list(product.expressions()) == [Const(0), Var("s")]
    assert RowReduce("v", "sum", "x").reads() == ("x", "v")
    assert Copy("t", Window("g", (load("n", I), Var("s")))).reads() == (Window("g", (load("n", I), Var("s"))), "n")


def test_replacing_and_adding_buffers():
    kernel = kernel_of()
    staged = kernel.with_buffer(replace(kernel.buffer("t"), stages=3))
    assert staged.buffer("t").stages == 3 and len(staged.buffers) == len(kernel.buffers)
    assert len(kernel.with_buffer(matrix("new", "r")).buffers) == len(kernel.buffers) + 1
    with pytest.raises(KeyError, match="kernel small has no buffer nowhere"):
        kernel.buffer("nowhere")
