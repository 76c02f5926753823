"""Hopper kernels on the machine interpreter: the values of the tile interpreter, and every kind of planted fault."""

from dataclasses import replace

import pytest
from attention_cases import Problem
from lowered_cases import copies, machine_equals_tile

from flashgen import lower
from flashgen.attention.forward import forward
from flashgen.interp import machine, tile
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.expr import Const, J, Var
from flashgen.ir.nodes import For, If
from flashgen.ir.visit import statements
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import ArriveEmpty, ConsumerBarrier, Role, TmaLoad, WaitEmpty, WaitFull, WaitWgmma, Wgmma
from flashgen.plan import planner, sm90
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

ARCH = parse_arch("sm_90a")
WARP = Var("warp")


def plan(spec, warpgroups=1, block_kv=64):
    kernel = forward(spec)
    wanted = {"block_q": 64 * warpgroups, "block_kv": block_kv}
    candidate = next(item for item in sm90.candidates(kernel) if dict(item.blocks) == wanted)
    return planner.make(kernel, spec, ARCH, candidate)


def lowered(spec, **blocks):
    chosen = plan(spec, **blocks)
    return lower.run(forward(spec), chosen), chosen


def problem(spec, seqlen_q, seqlen_k, **more):
    return Problem(spec, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **more)


def run(kernel, chosen, case, seed=0):
    arrays = {**case.arrays, **case.outputs(chosen.sizes)}
    machine.run(kernel, chosen, arrays, case.scalars, seed)
    return arrays


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "head_dim", "head_dim_v", "warpgroups", "block_kv"),
    [
        ((64, 64), 16, 16, 1, 64),
        ((70, 400), 16, 32, 1, 64),  # the stages go round
        ((130, 200), 40, 16, 2, 80),
        ((200, 130), 72, 96, 1, 64),  # rows that see no key, a second panel
        ((1, 300), 16, 16, 3, 96),
        ((65, 1), 128, 128, 1, 64),
        ((64, 0), 16, 16, 1, 64),
    ],
)
def test_lowered_kernels_equal_their_tile_form(causal, lengths, head_dim, head_dim_v, warpgroups, block_kv):
    spec = Spec(head_dim, head_dim_v, causal=causal)
    kernel, chosen = lowered(spec, warpgroups=warpgroups, block_kv=block_kv)
    case = problem(spec, *lengths, heads=2, heads_kv=1)
    before = {**case.arrays, **case.outputs(chosen.sizes)}
    after = copies(before)
    tile.run(lower.tile(forward(spec)), chosen.sizes, after, case.scalars, tile.Counter())
    for seed in (0, 1):
        machine_equals_tile(kernel, chosen, case, before, after, seed)


# Faults, each in a kernel that is right without it


def without(kernel, kind, which=0, where=lambda stmt: True):
    """The kernel without one statement of a kind: the `which`-th in program order."""
    return changed(kernel, kind, lambda stmt: (), which, where)


def changed(kernel, kind, change, which=0, where=lambda stmt: True):
    found = [stmt for stmt in statements(kernel.body) if isinstance(stmt, kind) and where(stmt)]
    target = found[which]

    def rewrite(body):
        result = []
        for stmt in body:
            if stmt is target:
                result += change(stmt)
            elif isinstance(stmt, For | If | Role):
                result.append(replace(stmt, body=rewrite(stmt.body)))
            else:
                result.append(stmt)
        return tuple(result)

    return kernel.having(body=rewrite(kernel.body))


SPEC = Spec(16, 16)


def of(buffer):
    return lambda stmt: stmt.tile.buffer == buffer


FAULTS = {
    "no wait for Q": (lambda k: without(k, WaitFull, 0, of("q_tile")), "without a wait for its load"),
    "no wait for K in the loop": (lambda k: without(k, WaitFull, 1, of("k_tile")), "without a wait for its load"),
    "no wait for V in the loop": (lambda k: without(k, WaitFull, 0, of("v_tile")), "without a wait for its load"),
    "no wait for an empty stage": (lambda k: without(k, WaitEmpty, 0, of("k_tile")), "in flight|overwritten"),
    "wrong parity of a full wait": (
        lambda k: changed(k, WaitFull, lambda s: [replace(s, parity=Const(1) - s.parity)], 1, of("k_tile")),
        "waits at|without a wait|in flight",
    ),
    "wrong parity of an empty wait": (
        lambda k: changed(k, WaitEmpty, lambda s: [replace(s, parity=Const(1) - s.parity)], 0, of("v_tile")),
        "waits at",
    ),
    "a stage is never released": (lambda k: without(k, ArriveEmpty, 1, of("k_tile")), "waits at"),
    "a stage is released twice": (
        lambda k: changed(k, ArriveEmpty, lambda s: [s, s], 1, of("k_tile")),
        "arrives twice|without a wait|overwritten",
    ),
    "a stage is released before its product is done": (
        lambda k: changed(k, Wgmma, lambda s: [s, ArriveEmpty(s.b)], 1, lambda s: s.acc == "s"),
        "released while a product in flight reads it",
    ),
    "scores are used before their wait": (
        lambda k: without(k, WaitWgmma, 1),
        "used while a product|released while a product",
    ),
    "P is overwritten under its product": (
        lambda k: without(without(k, WaitWgmma, 2), ArriveEmpty, 1, of("v_tile")),
        "used while a product|overwritten while a product|released while a product",
    ),
    "a load is left out": (lambda k: without(k, TmaLoad, 2), "waits at"),
    "no barrier before O is laid over others": (
        lambda k: without(k, ConsumerBarrier, 0),
        "overwritten|warps have finished|read it",
    ),
    "no barrier before O is read": (lambda k: without(k, ConsumerBarrier, 1), "no barrier since"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_reported(fault):
    plant, message = FAULTS[fault]
    kernel, chosen = lowered(SPEC, warpgroups=2)
    case = problem(SPEC, 128, 500)
    run(kernel, chosen, case)
    faulty = plant(kernel)
    assert faulty != kernel
    with pytest.raises((Hazard, Deadlock), match=message):
        for seed in range(8):
            run(faulty, chosen, case, seed)


def test_a_named_barrier_that_some_warps_pass_by_is_reported():
    kernel, chosen = lowered(SPEC, warpgroups=2)
    faulty = changed(kernel, ConsumerBarrier, lambda s: [If(WARP < 4, (s,))], 1)
    with pytest.raises((Hazard, Deadlock), match=r"waits at|no barrier since"):
        run(faulty, chosen, problem(SPEC, 128, 64))


def test_masks_compare_a_column_with_one_limit_for_each_row():
    kernel, _ = lowered(Spec(16, 16, causal=True))
    masks = [s for s in statements(kernel.body) if isinstance(s, MapFragment) and s.dst == "s"]
    assert len(masks) == 2
    assert all(str(mask.expr.condition.x) == str(J) and mask.expr.condition.op == "<" for mask in masks)
