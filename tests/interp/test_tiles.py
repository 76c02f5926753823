"""Kernels that copy tiles of what their score functions read, on both interpreters, against dense float64 attention."""

from dataclasses import replace

import pytest
from attention_cases import assert_close
from block_lists import add_lists
from test_sm90 import ALL, ARCH, equals_tile, of, without
from test_sm90_backward import equals_tile as backward_equals_tile
from tile_scores import OUTER, score
from tiled_cases import Tiled

from flashgen import lower
from flashgen.attention import backward as nests
from flashgen.attention import tiles
from flashgen.attention.forward import forward
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.dtype import BF16, F16
from flashgen.ir.visit import statements
from flashgen.lower.sm90.guess import BIAS
from flashgen.machine.sm90 import ArriveEmpty, FenceReads, LoadMatrix, TmaLoad, WaitEmpty, WaitFull
from flashgen.plan import planner, sm90
from flashgen.spec import Spec

TRAITS = [(), ("dynamic",), ("persistent", "in turns"), ALL]


def spec_of(name, head_dim=16, dtype=BF16, causal=True, **more):
    return Spec(head_dim, head_dim, BF16, causal, score=score(name, dtype), tiled=True, **more)


def planned(spec, warpgroups=2, block_kv=64, traits=ALL):
    """With the stages that candidates give to added tiles."""
    kernel = forward(spec)
    wanted = {"block_q": 64 * warpgroups, "block_kv": block_kv}
    candidate = next(
        item
        for item in sm90.candidates(kernel, planner.head_dims(spec, ARCH, kernel.name))
        if dict(item.blocks) == wanted
    )
    chosen = planner.make(kernel, spec, ARCH, replace(candidate, traits=traits))
    return lower.run(kernel, chosen), chosen


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(21, 30), (30, 13), (5, 0)], ids=str)
def test_the_tile_form_against_dense_attention(name, causal, lengths):
    """Batches and heads that share an array, grouped heads, arrays that are larger than the scores."""
    spec = spec_of(name, causal=causal)
    assert len(tiles.of(spec)) == len(OUTER[name])
    case = Tiled(spec, name, 2, 4, 2, *lengths, more=(3, 5))
    assert_close(case.run_tile(8, 16), case.dense(), BF16)
    spec = spec_of(name, causal=causal, deterministic=True)
    case = Tiled(spec, name, 2, 4, 2, *lengths)
    assert_close(case.run_tile(16, 8), case.dense(), BF16)


@pytest.mark.parametrize("name", OUTER)
@pytest.mark.parametrize("traits", TRAITS, ids=str)
def test_the_hopper_forward_equals_its_tile_form(name, traits):
    spec = spec_of(name)
    case = Tiled(spec, name, 2, 2, 1, 150, 200)
    equals_tile(spec, case, *planned(spec, traits=traits), seeds=(0,))


@pytest.mark.parametrize(
    ("warpgroups", "block_kv", "lengths"), [(1, 80, (70, 300)), (3, 96, (1, 130)), (2, 64, (9, 0))]
)
def test_every_shape_of_tile(warpgroups, block_kv, lengths):
    spec = spec_of("of_both", 40, F16, causal=False)
    case = Tiled(spec, "of_both", 2, 1, 1, *lengths)
    equals_tile(spec, case, *planned(spec, warpgroups, block_kv))


@pytest.mark.parametrize("causal", [False, True])
def test_a_step_that_is_done_again_adds_the_same(causal):
    """What is added leaves the guess far behind in most steps."""
    spec = spec_of("of_both", causal=causal)
    case = Tiled(spec, "of_both", 2, 1, 1, 150, 400, height=20 * BIAS[BF16])
    traces = equals_tile(spec, case, *planned(spec))
    assert all(trace.statements["Rescore"] > 8 for trace in traces)


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, {}), (128, {}), (64, {"deterministic": True}), (192, {"deterministic": True}), (128, {"causal": False})],
    ids=str,
)
def test_the_hopper_backward_equals_its_tile_form(head_dim, options):
    spec = spec_of("of_both", head_dim, F16, **options)
    case = Tiled(spec, "of_both", 2, 2, 1, 150, 200)
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    case = Tiled(spec, "of_both", 1, 2, 1, 150, 200, more=(50, 60))
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))
    if spec.deterministic:
        backward_equals_tile(case, nests.backward_dq(spec), seeds=(0,))


@pytest.mark.parametrize("head_dim", [16, 256])
@pytest.mark.parametrize("more", [{}, {"sinks": BF16}, {"dropout": True}, {"listed": True}], ids=str)
def test_what_goes_with_them(more, head_dim):
    """At head_dim 256 O leaves over V: the first step of a tile is loaded apart from the others."""
    spec = spec_of("of_both", head_dim, **more)
    traits = ALL[:2] if spec.dropout else ALL
    kernel, chosen = planned(spec, traits=traits)
    assert bool(chosen.covered_by_output) is (head_dim == 256)
    case = Tiled(spec, "of_both", 2, 2, 1, 200, 300)
    if spec.listed:
        add_lists(case, chosen.sizes)
    equals_tile(spec, case, kernel, chosen, seeds=(0,))


def test_a_listed_backward():
    spec = spec_of("of_both", 64, listed=True)
    case = Tiled(spec, "of_both", 2, 2, 1, 150, 200)
    add_lists(case, dict.fromkeys(("block_q", "block_kv"), 128))
    backward_equals_tile(case, nests.backward(spec), seeds=(0,))


def test_every_copy_is_waited_for_and_released_once_a_step():
    kernel, _ = planned(spec_of("of_both"))
    every = list(statements(kernel.body))
    loads, waits, releases = (
        [stmt for stmt in every if isinstance(stmt, kind) and stmt_tile(stmt).startswith("aux_")]
        for kind in (TmaLoad, WaitFull, ArriveEmpty)
    )
    assert len(loads) == 1 and len(waits) == len(releases) == 2  # in the first step, and in the loop
    assert not any(load.reuse for load in loads)
    assert sum(isinstance(stmt, LoadMatrix) for stmt in every) == 3  # and where a step is done again


def stmt_tile(stmt):
    return (stmt.dst if isinstance(stmt, TmaLoad) else stmt.tile).buffer


@pytest.mark.parametrize(
    ("kind", "which", "error", "said"),
    [
        (WaitFull, 0, Hazard, "without a wait for its load"),
        (WaitFull, 1, Hazard, "without a wait for its load"),
        (WaitEmpty, 0, Hazard, "in flight|overwritten"),
        (ArriveEmpty, 1, Deadlock, "wait_empty tile=aux_x_tile"),
    ],
)
def test_planted_faults_are_found(kind, which, error, said):
    spec = spec_of("of_both", causal=False)
    kernel, chosen = planned(spec)
    broken = without(kernel, kind, which, of("aux_x_tile"))
    with pytest.raises(error, match=said):
        equals_tile(spec, Tiled(spec, "of_both", 1, 1, 1, 150, 400), broken, chosen)


@pytest.mark.parametrize("which", [0, 2])  # of the first step and of the loop; between is that of a step done again
def test_a_stage_that_is_released_before_it_is_read_is_found(which):
    """An arrival overtakes reads on the chip: the stage was overwritten by the next copy."""
    spec = spec_of("of_both", causal=False)
    kernel, chosen = planned(spec)
    with pytest.raises(Hazard, match="released with no fence since it was read"):
        equals_tile(spec, Tiled(spec, "of_both", 1, 1, 1, 150, 400), without(kernel, FenceReads, which), chosen)
