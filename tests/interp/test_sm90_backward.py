"""The Hopper backward on the machine interpreter: the values of the tile interpreter, and planted faults."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from lowered_cases import copies, machine_equals_tile
from test_sm90 import changed, of, without

from flashgen import lower
from flashgen.attention import backward as nests
from flashgen.interp import machine, tile
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir import verify
from flashgen.ir.dtype import BF16, F16
from flashgen.ir.expr import Const, J
from flashgen.ir.nodes import Copy, Gemm
from flashgen.ir.visit import statements
from flashgen.lower.sm90 import roles
from flashgen.machine.base import AddFragment, Assign, MapFragment, StoreFragment
from flashgen.machine.sm90 import (
    ArriveEmpty,
    ArriveFull,
    ConsumerBarrier,
    FenceStores,
    HandOver,
    LoadVector,
    Role,
    TakeOver,
    TmaLoad,
    WaitEmpty,
    WaitFull,
    WaitWgmma,
    WarpgroupBarrier,
    Wgmma,
)
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch
from flashgen.plan.transposed import TRANSPOSED, transpose_sums
from flashgen.spec import Spec

ARCH = parse_arch("sm_90a")
PORTABLE = parse_arch(ARCH.portable)
DQ = "attention_backward_dq"


def plan(nest, spec, block=None, depths=None, traits=None):
    """The planner's best candidate with this block of the loop, stages and traits."""
    for verdict in planner.judged(nest, ARCH, planner.head_dims(spec, ARCH, nest.name)):
        candidate = verdict.candidate
        looped = candidate.blocks[1][1]
        if block in (None, looped) and depths in (None, candidate.depths) and traits in (None, candidate.traits):
            assert not verdict.rejection, f"{candidate}: {verdict.rejection}"
            return planner.make(nest, spec, ARCH, candidate)
    raise LookupError("no such candidate")


def prepared(case, chosen):
    """The arrays as they are before the kernel: with lse and delta by the portable kernel that makes them."""
    arrays = {**case.arrays, **case.outputs(chosen.sizes)}
    dense = case.dense()
    arrays |= {name: dense[name].astype(np.float32) for name in ("o", "lse")}
    delta = nests.delta(case.spec)
    sizes = planner.plan_like(delta, case.spec, PORTABLE, chosen).sizes if "dq_acc" in chosen.layouts else None
    tile.run(lower.tile(delta), sizes or chosen.sizes, arrays, case.scalars, tile.Counter())
    return arrays


def equals_tile(case, nest, seeds=(0, 1), **choice):
    chosen = plan(nest, case.spec, **choice)
    kernel = lower.run(nest, chosen)
    before = prepared(case, chosen)
    after = copies(before)
    tile.run(lower.tile(nest), chosen.sizes, after, case.scalars, tile.Counter())
    return [machine_equals_tile(kernel, chosen, case, before, after, seed, slack=2) for seed in seeds]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "head_dim", "head_dim_v", "heads", "dtype"),
    [
        ((64, 128), 128, 128, (1, 1), BF16),
        ((150, 200), 128, 128, (2, 1), BF16),  # dQ by columns, grouped heads, ragged
        ((150, 70), 72, 96, (2, 2), F16),  # padded to whole panels; rows that see no key
        ((300, 200), 16, 64, (4, 2), BF16),  # dQ by rows
        ((1, 130), 64, 40, (1, 1), F16),
        ((70, 1), 64, 64, (1, 1), BF16),
        ((0, 70), 64, 64, (1, 1), BF16),  # no step: dK and dV are zero
    ],
)
def test_the_backward_equals_its_tile_form(causal, lengths, head_dim, head_dim_v, heads, dtype):
    spec = Spec(head_dim, head_dim_v, dtype, causal)
    equals_tile(Problem(spec, 1, *heads, *lengths), nests.backward(spec))


@pytest.mark.parametrize("traits", [("late",), ()], ids=str)
@pytest.mark.parametrize("depths", [(2, 2, 2, 2, 2), (2, 2, 1, 1, 2), (1, 1, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_any_order_and_number_of_stages(head_dim, depths, traits):
    spec = Spec(head_dim, head_dim, causal=True)
    equals_tile(Problem(spec, 1, 2, 1, 200, 140), nests.backward(spec), (0,), depths=depths, traits=traits)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 80, 128])
def test_the_deterministic_kernels_equal_their_tile_form(causal, block):
    spec = Spec(64, 64, causal=causal, deterministic=True)
    case = Problem(spec, 1, 2, 1, 150, 200)
    equals_tile(case, nests.backward(spec), (0,), block=block)
    equals_tile(case, nests.backward_dq(spec), (0,), block=block)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_those_of_dense_attention(head_dim):
    spec = Spec(head_dim, head_dim, causal=True)
    case = Problem(spec, 1, 2, 1, 100, 150)
    nest = nests.backward(spec)
    chosen = plan(nest, spec)
    arrays = prepared(case, chosen)
    machine.run(lower.run(nest, chosen), chosen, arrays, case.scalars)
    convert = nests.convert_dq(spec)
    sizes = planner.plan_like(convert, spec, PORTABLE, chosen).sizes
    tile.run(lower.tile(convert), sizes, arrays, case.scalars, tile.Counter())
    assert_close(arrays, case.dense(), spec.dtype, ("dq", "dk", "dv"))


@pytest.mark.parametrize("level", [tile, machine], ids=["tile", "machine"])
@pytest.mark.parametrize("causal", [False, True])
def test_dq_may_be_kept_transposed(causal, level):
    spec = Spec(128, 128, causal=causal)
    case = Problem(spec, 1, 2, 1, 200, 150)  # 80 queries a block, of which the last has 40
    nest, convert = nests.backward(spec), nests.convert_dq(spec)
    chosen = plan(nest, spec, block=80)
    assert chosen.has(TRANSPOSED)
    after = planner.plan_like(convert, spec, PORTABLE, chosen)
    assert after.has(TRANSPOSED) and after.layouts["dq_acc"] == chosen.layouts["dq_acc"]
    arrays = prepared(case, chosen)
    if level is machine:
        machine.run(lower.run(nest, chosen), chosen, arrays, case.scalars)
        machine.run(lower.run(convert, after), after, arrays, case.scalars)
    else:
        for kernel, of in ((nest, chosen), (convert, after)):
            tile.run(lower.tile(transpose_sums(kernel)), of.sizes, arrays, case.scalars, tile.Counter())
    assert_close(arrays, case.dense(), spec.dtype, ("dq", "dk", "dv"))


def test_only_sums_that_leave_and_what_feeds_them_are_transposed():
    kernel = transpose_sums(nests.backward(Spec(128, 128)))
    shapes = {item.name: item.shape for item in kernel.buffers}
    assert shapes["dq_acc"] == ("head_dim", "block_q") and shapes["ds_tile"] == ("block_q", "block_kv")
    before = {item.name: item.shape for item in nests.backward(Spec(128, 128)).buffers}
    assert {name for name, shape in shapes.items() if shape != before[name]} == {"dq_acc", "ds_tile"}
    product = next(stmt for stmt in statements(kernel.body) if isinstance(stmt, Gemm) and stmt.acc == "dq_acc")
    assert (product.a, product.b, product.transpose_a, product.transpose_b) == ("k_tile", "ds_tile", True, True)
    turned = [stmt.dst for stmt in statements(kernel.body) if isinstance(stmt, Copy) and stmt.transpose]
    assert turned == ["ds_tile"]
    with pytest.raises(verify.VerifyError, match="ds_tile is no shared tile for the transpose"):
        verify.tile(kernel.having(buffers=nests.backward(Spec(128, 128)).buffers))


def test_scores_and_their_gradient_are_issued_together_and_dk_behind_dq():
    spec = Spec(128, 128)
    nest = nests.backward(spec)
    for traits, expected in ((("late",), "s dp ds dv_acc dq_acc dk_acc"), ((), "s dp dv_acc ds dq_acc dk_acc")):
        kernel = lower.run(nest, plan(nest, spec, traits=traits))
        kinds = (Wgmma, MapFragment)
        found = [stmt for stmt in statements(kernel.body) if isinstance(stmt, kinds)]
        order = [stmt.acc if isinstance(stmt, Wgmma) else stmt.dst for stmt in found]
        assert " ".join(name for at, name in enumerate(order) if name != "p" and order.index(name) == at) == expected


def test_transposed_masks_compare_a_column_with_one_limit_for_each_row():
    """Two comparisons an element would serialise the products."""
    spec = Spec(64, 64, causal=True)
    nest = nests.backward(spec)
    kernel = lower.run(nest, plan(nest, spec))
    masks = [s for s in statements(kernel.body) if isinstance(s, MapFragment) and s.dst == "s"]
    assert len(masks) == 1
    assert masks[0].expr.condition.x == J and masks[0].expr.condition.op == ">="


def loaded(buffer):
    return lambda stmt: stmt.dst.buffer == buffer


FAULTS = {
    "no wait for K": (lambda k: without(k, WaitFull, 0, of("k_tile")), "without a wait for its load"),
    "no wait for Q": (lambda k: without(k, WaitFull, 0, of("q_tile")), "without a wait for its load"),
    "no wait for dO": (lambda k: without(k, WaitFull, 0, of("dout_tile")), "without a wait for its load|in flight"),
    "wrong parity of a full wait": (
        lambda k: changed(k, WaitFull, lambda s: [replace(s, parity=Const(1) - s.parity)], 0, of("q_tile")),
        "waits at|without a wait|in flight",
    ),
    "no wait for an empty stage": (lambda k: without(k, WaitEmpty, 0, of("q_tile")), "in flight|overwritten"),
    "dO is never released": (lambda k: without(k, ArriveEmpty, 0, of("dout_tile")), "waits at"),
    "Q is released before dK is done": (
        lambda k: changed(k, Wgmma, lambda s: [s, ArriveEmpty(s.b)], 0, lambda s: s.acc == "dk_acc"),
        "released while a product in flight reads it",
    ),
    "a stage is released by its next name": (
        lambda k: changed(without(k, ArriveEmpty, 0, of("q_tile")), Assign, lambda s: [s, release_of_q(k)]),
        "released without a wait for what landed",
    ),
    "a vector is not counted": (
        lambda k: changed(k, TmaLoad, lambda s: [replace(s, beside=())], 0, loaded("q_tile")),
        "does not count the bytes of lse_tile",
    ),
    "a vector is not loaded": (lambda k: without(k, LoadVector, 0), "waits at"),
    "no fence before dS is read": (lambda k: without(k, FenceStores, 0), "no fence since it was written"),
    "no barrier before dS is read": (
        lambda k: without(k, ConsumerBarrier, 0),
        "no barrier since|written last|before anything",
    ),
    "dS has one stage": (
        lambda k: changed(k, StoreFragment, lambda s: [replace(s, dst=replace(s.dst, stage=Const(0)))]),
        "written last|before anything was written|read it",
    ),
    "dS is overwritten under dQ": (
        lambda k: changed(k, Wgmma, lambda s: [s, store_of_ds(k)], 0, lambda s: s.acc == "dq_acc"),
        "ds_tile is overwritten while a product",
    ),
    "dP is used before its wait": (lambda k: without(k, WaitWgmma, 1), "used while a product"),
    "dQ is added before its wait": (
        lambda k: without(k, WaitWgmma, 2),
        "used while a product|finishes|product in flight reads",
    ),
    "no barrier before dK is laid over K": (lambda k: without(k, ConsumerBarrier, 1), "overwritten|read it|read by"),
}


def release_of_q(kernel):
    return next(s for s in statements(kernel.body) if isinstance(s, ArriveEmpty) and s.tile.buffer == "q_tile")


def store_of_ds(kernel):
    return next(s for s in statements(kernel.body) if isinstance(s, StoreFragment) and s.dst.buffer == "ds_tile")


def is_reported(fault, problem):
    plant, message = fault
    nest = nests.backward(problem.spec)
    chosen = plan(nest, problem.spec)
    kernel, before = lower.run(nest, chosen), prepared(problem, chosen)
    faulty = plant(kernel)
    assert faulty != kernel
    with pytest.raises((Hazard, Deadlock), match=message):
        for seed in range(8):
            machine.run(faulty, chosen, copies(before), problem.scalars, seed)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_reported(fault):
    is_reported(FAULTS[fault], Problem(Spec(128, 128, causal=True), 1, 2, 1, 400, 200))


def test_a_tile_that_goes_from_warp_to_warp_needs_two_stages():
    spec = Spec(128, 128)
    nest = nests.backward(spec)
    chosen = plan(nest, spec)
    stages = tuple((name, 1 if name == "ds_tile" else count) for name, count in chosen.candidate.stages)
    single = replace(chosen, candidate=replace(chosen.candidate, stages=stages))
    with pytest.raises(ValueError, match="ds_tile goes from warp to warp: it needs two stages"):
        lower.run(nest, single)


def test_the_part_through_which_dq_leaves_lies_over_no_other_tile():
    """Where it does, who reads the other tile finds what it does not expect, or is overwritten."""
    spec = Spec(128, 128, causal=True)
    nest = nests.backward(spec)
    chosen = plan(nest, spec)
    case = Problem(spec, 1, 2, 1, 400, 200)
    for under in ("q_tile", "k_tile", "ds_tile"):
        offset = chosen.placement(under).offset
        moved = tuple(replace(item, offset=offset) if item.buffer == "dq_part" else item for item in chosen.shared)
        with pytest.raises(Hazard):
            machine.run(lower.run(nest, chosen), replace(chosen, shared=moved), prepared(case, chosen), case.scalars)


def test_blocks_of_all_heads_run_side_by_side():
    spec = Spec(128, 128)
    kernel = lower.run(nests.backward(spec), plan(nests.backward(spec), spec))
    assert [axis.name for axis in kernel.axes] == ["head_kv", "kv_block", "batch"]
    assert not [stmt for stmt in statements(kernel.body) if isinstance(stmt, AddFragment)]


def test_unaligned_rows_take_the_portable_backward():
    from flashgen import build

    assert build.arch_for("attention_backward", Spec(128, 128), ARCH) == ARCH
    assert build.arch_for("attention_backward", Spec(256, 136), ARCH) == ARCH
    assert build.arch_for(DQ, Spec(64, 128, deterministic=True), ARCH) == ARCH
    assert build.arch_for("attention_backward", Spec(128, 128, aligned=False), ARCH) == PORTABLE


# Wide heads: one warpgroup computes dV, the other dK, and P goes from one to the other.


def wide(head_dim=256, head_dim_v=None, dtype=BF16, causal=False):
    return Spec(head_dim, head_dim_v or head_dim, dtype, causal, deterministic=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "head_dim", "head_dim_v", "heads", "dtype"),
    [
        ((64, 64), 256, 256, (1, 1), BF16),
        ((150, 200), 192, 128, (2, 1), BF16),  # dK has memory of its own; grouped heads, ragged
        ((150, 70), 136, 256, (2, 2), F16),  # q and k padded to v; rows that see no key
        ((300, 100), 200, 200, (4, 2), F16),
        ((1, 130), 256, 64, (1, 1), BF16),
        ((0, 70), 256, 256, (1, 1), BF16),  # no step: dK and dV are zero
    ],
)
def test_divided_work_equals_its_tile_form(causal, lengths, head_dim, head_dim_v, heads, dtype):
    spec = wide(head_dim, head_dim_v, dtype, causal)
    case = Problem(spec, 1, *heads, *lengths)
    equals_tile(case, nests.backward(spec))
    equals_tile(case, nests.backward_dq(spec), (0,))


@pytest.mark.parametrize("depths", [(2, 2, 2, 2, 2), (2, 2, 2, 2, 1), (2, 2, 1, 1, 2), (1, 1, 1, 1, 1)], ids=str)
def test_divided_work_with_any_number_of_stages(depths):
    spec = wide(causal=True)
    equals_tile(Problem(spec, 1, 2, 1, 200, 140), nests.backward(spec), (0,), depths=depths)


def test_gradients_of_wide_heads_are_those_of_dense_attention():
    spec = wide(192, 256, causal=True)
    case = Problem(spec, 1, 2, 1, 100, 150)
    arrays = {}
    for nest in (nests.backward(spec), nests.backward_dq(spec)):
        chosen = plan(nest, spec)
        arrays = {**prepared(case, chosen), **{name: arrays[name] for name in ("dk", "dv") if name in arrays}}
        machine.run(lower.run(nest, chosen), chosen, arrays, case.scalars)
    assert_close(arrays, case.dense(), spec.dtype, ("dq", "dk", "dv"))


def test_each_part_has_its_own_register_tiles_and_only_p_is_in_both():
    spec = wide()
    nest = nests.backward(spec)
    kernel = lower.run(nest, plan(nest, spec))
    first, second = (role for role in kernel.body if isinstance(role, Role) and role.warpgroup is not None)
    products = [[stmt.acc for stmt in statements(role.body) if isinstance(stmt, Wgmma)] for role in (first, second)]
    assert products == [["s", "dv_acc"], ["dp", "dk_acc"]]
    assert [stmt.src for stmt in statements(kernel.body) if isinstance(stmt, HandOver)] == ["p"]
    own = {item.name for item in kernel.buffers if item.first_warp}
    assert own == {"dp", "ds", "ds_operand", "dk_acc", "dk_out", "p_taken"}


def test_a_statement_on_tiles_of_two_warpgroups_is_refused():
    spec = wide()
    nest = nests.backward(spec)
    chosen = plan(nest, spec)
    kernel = nest
    for step in (*lower.SM90_PASSES[: lower.SM90_PASSES.index(roles.split_roles)],):
        kernel = step(kernel, chosen)
    kernel = kernel.with_buffer(replace(kernel.buffer("p"), first_warp=4))
    with pytest.raises(ValueError, match="touches register tiles of 2 warpgroups"):
        roles.split_roles(kernel, chosen)


def handed(stmt):
    return (stmt.tile if hasattr(stmt, "tile") else stmt.dst).buffer == "p_tile"


DIVIDED_FAULTS = {
    "P is taken without a wait": (lambda k: without(k, WaitFull, 0, handed), "read without a wait for it"),
    "P is handed over without a wait": (lambda k: without(k, WaitEmpty, 0, handed), "read it|overwritten"),
    "P is never released": (lambda k: without(k, ArriveEmpty, 0, handed), "waits at"),
    "nobody says that P is there": (lambda k: without(k, ArriveFull, 0), "waits at"),
    "P is said to be there before it is": (
        lambda k: changed(without(k, ArriveFull, 0), HandOver, lambda s: [ArriveFull(s.dst), s]),
        "no barrier since warp|before anything was written|read it|written last",
    ),
    "P is released before it is taken": (
        lambda k: changed(without(k, ArriveEmpty, 0, handed), TakeOver, lambda s: [ArriveEmpty(s.src), s]),
        "without a wait for it|read it|no barrier since",
    ),
    "wrong parity of the wait for P": (
        lambda k: changed(k, WaitFull, lambda s: [replace(s, parity=Const(1) - s.parity)], 0, handed),
        "waits at|without a wait|before anything",
    ),
    "dV leaves before every warp has stored its rows": (
        lambda k: without(k, WarpgroupBarrier, 1),
        "no barrier since|before anything was written|no fence since|written last",
    ),
}


@pytest.mark.parametrize("fault", DIVIDED_FAULTS)
def test_planted_faults_of_divided_work_are_reported(fault):
    is_reported(DIVIDED_FAULTS[fault], Problem(wide(causal=True), 1, 1, 1, 300, 100))
