"""Hopper kernels on the machine interpreter: the values of the tile interpreter, and every kind of planted fault."""

from dataclasses import replace

import pytest
from attention_cases import Problem
from lowered_cases import copies, machine_equals_tile

from flashgen import lower, variants
from flashgen.attention.forward import forward
from flashgen.interp import machine, tile
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.dtype import BF16, F16
from flashgen.ir.expr import Const, J, Var, text
from flashgen.ir.nodes import If, Let
from flashgen.ir.visit import rewrite_kernel, statements
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import (
    ArriveEmpty,
    AskTile,
    ConsumerBarrier,
    FenceReads,
    FenceStores,
    FirstTurn,
    IfAnyLarge,
    PassOver,
    PassTurn,
    PublishTile,
    Rescore,
    TmaLoad,
    WaitEmpty,
    WaitFull,
    WaitStored,
    WaitWgmma,
    WarpgroupBarrier,
    Wgmma,
)
from flashgen.plan import planner, sm90
from flashgen.plan.arch import parse_arch
from flashgen.plan.plan import LAST_FIRST
from flashgen.spec import Spec

ARCH = replace(parse_arch("sm_90a"), multiprocessors=2)  # so that a block takes many tiles
WARP = Var("warp")
ALL = ("dynamic", "in turns", "guessed maximum")


def plan(spec, warpgroups=1, block_kv=64, traits=None, arch=ARCH, stages=(("k_tile", 2), ("v_tile", 2))):
    kernel = forward(spec)
    wanted = {"block_q": 64 * warpgroups, "block_kv": block_kv}
    sizes = planner.head_dims(spec, arch)
    candidate = next(item for item in sm90.candidates(kernel, sizes) if dict(item.blocks) == wanted)
    candidate = replace(candidate, stages=stages)
    if traits is not None:
        candidate = replace(candidate, traits=traits)
    return planner.make(kernel, spec, arch, candidate)


def lowered(spec, **choice):
    chosen = plan(spec, **choice)
    return lower.run(forward(spec), chosen), chosen


def problem(spec, seqlen_q, seqlen_k, **more):
    return Problem(spec, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **more)


def run(kernel, chosen, case, seed=0):
    arrays = {**case.arrays, **case.outputs(chosen.sizes)}
    machine.run(kernel, chosen, arrays, case.scalars, seed)
    return arrays


def equals_tile(spec, case, kernel, chosen, seeds=(0, 1)):
    before = {**case.arrays, **case.outputs(chosen.sizes)}
    after = copies(before)
    tile.run(lower.tile(forward(spec)), chosen.sizes, after, case.scalars, tile.Counter())
    slack = 3 if chosen.has("guessed maximum") else 1  # P is rounded at another scale
    return [machine_equals_tile(kernel, chosen, case, before, after, seed, slack) for seed in seeds]


@pytest.mark.parametrize("block_kv", [64, 80, 128])
@pytest.mark.parametrize("lengths", [(384, 384), (200, 333), (400, 130), (192, 64), (500, 200)])
def test_each_warpgroup_ends_with_its_own_last_block(lengths, block_kv):
    spec = Spec(64, 64, causal=True)
    kernel, chosen = lowered(spec, warpgroups=3, block_kv=block_kv)
    assert chosen.own_blocks
    assert any(isinstance(stmt, PassOver) for stmt in statements(kernel.body))
    equals_tile(spec, problem(spec, *lengths, batches=2, heads=1, heads_kv=1), kernel, chosen, seeds=(0, 1, 2))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (70, 0)}], ids=str)
@pytest.mark.parametrize("lengths", [(130, 130), (100, 333), (200, 90), (64, 0)])
def test_from_the_last_block_of_keys_to_the_first(lengths, options):
    causal, mask, score = variants.functions(**{"causal": False, **options})
    spec = Spec(64, 64, causal=causal, mask=mask, score=score)
    kernel, chosen = lowered(spec, warpgroups=3, traits=(*ALL, LAST_FIRST))
    kinds = [stmt for stmt in statements(kernel.body) if isinstance(stmt, Let) and stmt.name == "kv_start"]
    assert any("-" in text(stmt.value) for stmt in kinds), "counted downwards"
    equals_tile(spec, problem(spec, *lengths, batches=2, heads=1, heads_kv=1), kernel, chosen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("resident", sm90.RESIDENT_REGISTERS)
def test_several_blocks_run_together_on_a_multiprocessor(resident, causal):
    spec = Spec(64, 64, causal=causal)
    verdicts = planner.judged(forward(spec), ARCH, planner.head_dims(spec, ARCH))
    fitting = [item.candidate for item in verdicts if item.candidate.resident == resident and not item.rejection]
    assert fitting
    for candidate in fitting:
        chosen = planner.make(forward(spec), spec, ARCH, candidate)
        beginning = ARCH.registers // resident // chosen.threads // 8 * 8  # what a thread has before setmaxnreg
        assert sum(chosen.role_registers) == 2 * beginning and chosen.registers <= chosen.role_registers[1]
        assert chosen.shared_bytes <= ARCH.shared_per_multiprocessor // resident - 1024
    kernel = lower.run(forward(spec), chosen)
    assert f"multiprocessors * {resident}" in text(kernel.axes[0].extent), "so many begin at once"
    equals_tile(spec, problem(spec, 200, 150, heads=2, heads_kv=1), kernel, chosen)


def test_a_block_that_is_not_passed_over_is_never_loaded_again():
    spec = Spec(64, 64, causal=True)
    kernel, chosen = lowered(spec, warpgroups=3, block_kv=64)
    kernel = rewrite_kernel(
        kernel, lambda stmt: () if isinstance(stmt, PassOver) and stmt.tile.buffer == "v_tile" else stmt
    )
    with pytest.raises(Deadlock, match="v_tile"):
        run(kernel, chosen, problem(spec, 384, 384, batches=2, heads=1, heads_kv=1))


def test_a_block_passed_over_without_its_wait_is_reported():
    spec = Spec(64, 64, causal=True)
    kernel, chosen = lowered(spec, warpgroups=3, block_kv=64)
    kernel = rewrite_kernel(kernel, lambda stmt: ArriveEmpty(stmt.tile) if isinstance(stmt, PassOver) else stmt)
    with pytest.raises(Hazard, match=r"released without a wait|arrives twice"):
        run(kernel, chosen, problem(spec, 384, 384, batches=2, heads=1, heads_kv=1))


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
    equals_tile(spec, problem(spec, *lengths, heads=2, heads_kv=1), kernel, chosen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "traits", [(), ("persistent",), ("dynamic",), ("dynamic", "in turns"), ("guessed maximum",), ALL]
)
@pytest.mark.parametrize("roomy", [True, False], ids=["O apart", "O over V"])
def test_every_trait_gives_the_same_values(causal, traits, roomy):
    spec = Spec(16, 16, causal=causal)
    arch = ARCH if roomy else replace(ARCH, shared_per_block=30 * 1024)
    kernel, chosen = lowered(spec, warpgroups=2, traits=traits, arch=arch)
    assert bool(chosen.covered_by_output) is not roomy
    equals_tile(spec, problem(spec, 300, 200, heads=2, heads_kv=1), kernel, chosen)


@pytest.mark.parametrize("q_stages", [1, 2])
@pytest.mark.parametrize(("k_stages", "v_stages"), [(2, 3), (3, 2), (3, 3)])
def test_any_number_of_stages(q_stages, k_stages, v_stages):
    spec = Spec(16, 16, causal=True)
    stages = (("k_tile", k_stages), ("v_tile", v_stages), ("q_tile", q_stages))
    kernel, chosen = lowered(spec, stages=stages)
    equals_tile(spec, problem(spec, 300, 400, heads=2, heads_kv=1), kernel, chosen)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("factor", [1, 32, 4096])
def test_a_guess_that_was_too_low_is_made_good(dtype, factor):
    """Later keys score higher: by more than the bias, and by more than exp2 can take."""
    spec = Spec(16, 16, dtype=dtype, causal=True)
    kernel, chosen = lowered(spec, traits=ALL[::2])
    case = problem(spec, 100, 300)
    case.arrays["k"][..., 100:, :] *= factor
    for trace in equals_tile(spec, case, kernel, chosen):
        assert bool(trace.statements.get("Rescore")) is (factor > 1)


def test_the_blocks_of_a_launch_take_every_tile_once_and_leave_the_counter_at_zero():
    spec = Spec(16, 16, causal=True)
    kernel, chosen = lowered(spec)
    for seqlen_q, heads in ((64, 1), (500, 3)):  # fewer tiles than blocks, more
        case = problem(spec, seqlen_q, 80, heads=heads)
        trace = machine.run(kernel, chosen, {**case.arrays, **case.outputs(chosen.sizes)}, case.scalars)
        tiles = -(-seqlen_q // 64) * heads
        assert trace.statements["AskTile"] == tiles
        assert trace.statements["TmaStore"] == 4 * tiles  # counted for each warp


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
            elif hasattr(stmt, "body"):
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
    "no wait for V in the loop": (lambda k: without(k, WaitFull, 1, of("v_tile")), "without a wait for its load"),
    "no wait for the next tile": (lambda k: without(k, WaitFull, 1, of("next_tile")), "without a wait for it"),
    "no wait for an empty stage": (lambda k: without(k, WaitEmpty, 0, of("k_tile")), "in flight|overwritten"),
    "no wait for an empty Q": (lambda k: without(k, WaitEmpty, 0, of("q_tile")), "in flight|overwritten"),
    "no wait for O to have left": (
        lambda k: without(k, WaitEmpty, 0, of("o_tile")),
        "reads it|overwritten|share these bytes|written last",
    ),
    "wrong parity of a full wait": (
        lambda k: changed(k, WaitFull, lambda s: [replace(s, parity=Const(1) - s.parity)], 1, of("k_tile")),
        "waits at|without a wait|in flight",
    ),
    "wrong parity of an empty wait": (
        lambda k: changed(k, WaitEmpty, lambda s: [replace(s, parity=Const(1) - s.parity)], 0, of("v_tile")),
        "waits at",
    ),
    "a stage is never released": (lambda k: without(k, ArriveEmpty, 1, of("k_tile")), "waits at"),
    "Q is never released": (lambda k: without(k, ArriveEmpty, 0, of("q_tile")), "waits at"),
    "a place is never released": (lambda k: without(k, ArriveEmpty, 0, of("next_tile")), "waits at"),
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
    "no end is published": (lambda k: without(k, PublishTile, 1), "waits at"),
    "a tile is asked for twice": (lambda k: changed(k, AskTile, lambda s: [s, s]), "more questions than tiles"),
    "no barrier before O is laid over others": (
        lambda k: without(k, ConsumerBarrier, 0),
        "overwritten|warps have finished|read it",
    ),
    "no barrier before O is read": (lambda k: without(k, WarpgroupBarrier, 0), "no barrier since|written last"),
    "no fence before O is read": (lambda k: without(k, FenceStores), "with no fence"),
    "shared memory is given away while O leaves": (
        lambda k: without(k, WaitStored),
        "copy to global memory reads it|written last",
    ),
    "a turn is not passed": (lambda k: without(k, PassTurn), "waits at"),
    "nobody has the first turn": (lambda k: without(k, FirstTurn), "waits at"),
    "K is released before the warp has what it read of it": (
        lambda k: without(k, FenceReads),
        "released with no fence since it was read",
    ),
    "K is released before its scores are done again": (
        lambda k: changed(k, IfAnyLarge, lambda s: [ArriveEmpty(k_of(s)), s]),
        "without a wait|arrives twice|overwritten|read where",
    ),
}


def k_of(stmt):
    return next(inner.b for inner in stmt.body if isinstance(inner, Rescore))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_reported(fault):
    plant, message = FAULTS[fault]
    crowded = replace(ARCH, shared_per_block=30 * 1024)  # O lies over V
    kernel, chosen = lowered(SPEC, warpgroups=2, traits=ALL, arch=crowded)
    case = problem(SPEC, 300, 500, heads=2)
    case.arrays["k"][..., 300:, :] *= 32
    run(kernel, chosen, case)
    faulty = plant(kernel)
    assert faulty != kernel
    with pytest.raises((Hazard, Deadlock), match=message):
        for seed in range(8):
            run(faulty, chosen, case, seed)


def test_o_apart_waits_for_the_o_before():
    kernel, chosen = lowered(SPEC, warpgroups=2)
    case = problem(SPEC, 600, 64)
    run(kernel, chosen, case)
    with pytest.raises(Hazard, match="copy to global memory reads it"):
        run(without(kernel, WaitStored), chosen, case)


def test_a_named_barrier_that_some_warps_pass_by_is_reported():
    kernel, chosen = lowered(SPEC, warpgroups=2)
    faulty = changed(kernel, WarpgroupBarrier, lambda s: [If(WARP < 2, (s,))], 1)
    with pytest.raises((Hazard, Deadlock), match=r"waits at|no barrier since"):
        run(faulty, chosen, problem(SPEC, 128, 64))


def test_masks_compare_a_column_with_one_limit_for_each_row():
    kernel, _ = lowered(Spec(16, 16, causal=True))
    masks = [s for s in statements(kernel.body) if isinstance(s, MapFragment) and s.dst == "s"]
    assert len(masks) == 3  # of the first step, of the others, and where one is done again
    assert all(str(mask.expr.condition.x) == str(J) and mask.expr.condition.op == "<" for mask in masks)
