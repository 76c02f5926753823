"""Operands that go through shared memory, and those that stay in registers."""

from flashgen.attention import backward, forward
from flashgen.ir.nodes import Copy, Gemm, Space
from flashgen.plan import cost
from flashgen.plan.operands import routed, shared_twin, through_shared
from flashgen.spec import Spec


def layouts_of(kernel, **changes):
    tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
    return {**dict.fromkeys(tiles, (4, 1)), **changes}


def test_operands_stay_in_registers_where_the_rows_agree():
    kernel = forward.forward(Spec(64, 64))
    assert routed(kernel, layouts_of(kernel)) == []
    assert through_shared(kernel, layouts_of(kernel)) is kernel


def test_a_new_tile_for_a_routed_operand_and_an_old_one_where_there_is_one():
    kernel = backward.backward(Spec(64, 64))
    layouts = dict.fromkeys(layouts_of(kernel), (2, 2))
    assert routed(kernel, layouts) == ["p_operand", "ds_operand"]
    assert (shared_twin(kernel, "p_operand"), shared_twin(kernel, "ds_operand")) == ("p_tile", "ds_tile")
    result = through_shared(kernel, layouts)
    assert routed(result, layouts) == []
    assert {b.name for b in result.buffers} - {b.name for b in kernel.buffers} == {"p_tile"}
    body = list(cost.loop_statements(result))
    copies = [stmt for stmt in body if isinstance(stmt, Copy) and stmt.src in ("p_operand", "ds_operand")]
    assert [(copy.dst, copy.src) for copy in copies] == [("p_tile", "p_operand"), ("ds_tile", "ds_operand")]
    assert all(
        body.index(copy) < body.index(next(s for s in body if isinstance(s, Gemm) and s.a == copy.dst))
        for copy in copies
    )
