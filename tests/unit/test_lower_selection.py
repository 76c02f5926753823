"""Instruction selection: every tile statement becomes hardware statements, every operand lies where they read it."""

import pytest
from staged_kernels import ALL, SPEC, find, staged_plan, up_to

from flashgen import build
from flashgen.attention import backward
from flashgen.ir import verify
from flashgen.ir.expr import Cast
from flashgen.ir.nodes import Copy, For, Gemm, If, Let, Level, Map, Note, RowReduce, Space
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import statements
from flashgen.lower import operands, sm80
from flashgen.machine.base import CombineLanes, MachineStmt, PackFragment, ReduceRows
from flashgen.machine.sm80 import CopyTileAsync, CopyTileElements, MmaSync
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec


@pytest.mark.parametrize("stages", ALL.values(), ids=ALL)
def test_every_tile_statement_becomes_hardware_statements(stages):
    kernel = up_to(sm80.select, stages.tile, stages.plan)
    assert kernel.level is Level.MACHINE
    assert all(isinstance(stmt, MachineStmt | For | If | Let | Note) for stmt in statements(kernel.body))
    for buffer in kernel.buffers:
        assert (buffer.warps is not None) == (buffer.space is Space.REGISTER)
        assert buffer.stages == (stages.plan.stages.get(buffer.name, 1) if buffer.space is Space.SHARED else 1)
    before = operands.through_shared(stages.tile, stages.plan)
    assert len(find(kernel, MmaSync)) == len(find(before, Gemm))
    assert len(find(kernel, ReduceRows)) == len(find(kernel, CombineLanes)) == len(find(before, RowReduce))
    packed = {stmt.dst for stmt in find(before, Map) if isinstance(stmt.expr, Cast)}
    assert {stmt.dst for stmt in find(kernel, PackFragment)} == packed
    assert {stmt.note for stmt in find(before, Gemm) if stmt.note} == {s.note for s in find(kernel, MmaSync) if s.note}


def test_a_row_vector_is_divided_like_the_tile_of_its_rows():
    stages = ALL["attention_forward"]
    for name in ("row_max", "row_sum", "lse_row"):
        assert stages.machine.buffer(name).warps == (stages.machine.buffer("o_acc").warps[0], 1)


@pytest.mark.parametrize(("aligned", "kind"), [(True, CopyTileAsync), (False, CopyTileElements)])
def test_the_copy_follows_the_alignment(aligned, kind):
    stages = build.forward(Spec(64, 64, aligned=aligned), parse_arch("sm_80"))[0]
    copies = find(stages.machine, (CopyTileAsync, CopyTileElements))
    assert len(copies) == 5  # q, and k and v in the prologue and in the loop
    assert {type(stmt) for stmt in copies} == {kind}


def test_through_shared_leaves_only_operands_that_agree():
    kernel = backward.backward(SPEC)
    plan = staged_plan(kernel, SPEC, 1, 1, split=2)
    routed = up_to(operands.through_shared, kernel, plan)
    verify.tile(routed)
    for product in find(routed, Gemm):
        if routed.space(product.a) is Space.REGISTER:
            assert plan.layouts[product.a] == plan.layouts[product.acc] and plan.layouts[product.a][1] == 1
    assert [stmt_text(s) for s in find(routed, Copy, lambda s: s.src == "p_operand")] == ["p_tile = copy p_operand"]
