"""The kernels that the passes make: hazard-free in every order of the warps, and equal to their tile form.

Faults are planted in them too: a pass that forgets a wait or a barrier must not get past the interpreter.
"""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from lowered_cases import Choice, compare, copies, machine_equals_tile, plans

from flashgen import build, lower
from flashgen.interp import tile
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.dtype import BF16, F16
from flashgen.ir.nodes import For
from flashgen.ir.visit import rewrite, rewrite_kernel, statements
from flashgen.lower import loops
from flashgen.machine.base import Barrier, CombineLanes
from flashgen.machine.sm80 import WaitGroup
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

CHOICES = [
    Choice(1, 1, 16),
    Choice(2, 2, 16, (2, 1)),
    Choice(2, 1, 32, (1, 2)),
    Choice(4, 1, 32, (2, 2)),
    Choice(4, 1, 32, (3, 2), split=2),
]
LENGTHS = [(37, 45), (16, 32), (45, 20), (1, 33)]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_lowered_kernels_equal_their_tile_form(choice, deterministic):
    for causal, lengths in zip((False, True, True, False), LENGTHS, strict=True):
        problem = Problem(Spec(32, 24, BF16, causal, deterministic), 1, 2, 1, *lengths)
        chosen = plans(problem, choice)
        assert chosen is not None, choice
        traces = compare(problem, chosen, seeds=range(2))
        orders = [trace.fragment_orders["dq_workspace"] for trace in traces.values() if trace.fragment_orders]
        assert len(set(orders)) == (0 if deterministic else 1), "kernels disagree about the order of the accumulator"


@pytest.mark.parametrize("spec", [Spec(8, 40, F16, causal=True, aligned=False), Spec(40, 8, BF16, deterministic=True)])
def test_other_types_head_dims_and_unaligned_copies(spec):
    problem = Problem(spec, 2, 4, 2, 21, 30)
    chosen = plans(problem, CHOICES[1])
    assert chosen is not None
    compare(problem, chosen)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_spec_shape_and_plan(data):
    draw = data.draw
    dims, flag, length = st.sampled_from([8, 16, 24]), st.booleans(), st.integers(0, 70)
    spec = Spec(draw(dims), draw(dims), draw(st.sampled_from([BF16, F16])), draw(flag), draw(flag), draw(flag))
    heads_kv, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    problem = Problem(spec, 1, heads_kv * group, heads_kv, draw(length), draw(length))
    stages = st.integers(1, 3)
    warps, split = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]))
    choice = Choice(
        warps, draw(st.integers(1, 2)), draw(st.sampled_from([16, 32])), (draw(stages), draw(stages)), split
    )
    chosen = plans(problem, choice)
    assume(chosen is not None)
    compare(problem, chosen, seeds=[draw(st.integers(0, 99))])


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3])
def test_the_result_may_lie_over_any_stage(steps, stages):
    """dK lies over a later stage of the queries; which stage the last step reads depends on the number of steps."""
    problem = Problem(Spec(32, 64, BF16, False, deterministic=True), 1, 1, 1, 48 * steps, 20)
    chosen = plans(problem, Choice(4, 1, 48, (stages, 1)))
    assert chosen is not None
    where = chosen["attention_backward"].placement
    assert where("dk_tile").end > where("q_tile").offset + where("q_tile").stage_bytes, "the case has lost its point"
    compare(problem, chosen)


@pytest.mark.parametrize("spec", [Spec(64, 64, BF16, causal=True), Spec(128, 128, BF16), Spec(64, 64, F16, True, True)])
def test_the_planners_own_choice_on_a_real_chip(spec):
    problem = Problem(spec, 1, 2, 1, 150, 200)
    compare(problem, {name: stages.plan for name, stages in build.everything(spec, parse_arch("sm_80")).items()})


# Passes on the TILE form


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [*LENGTHS, (40, 7), (0, 5), (5, 0)])
def test_tile_passes_keep_the_results(causal, lengths):
    problem = Problem(Spec(16, 16, BF16, causal), 1, 4, 2, *lengths)
    plain = problem.run_tile(8, 16)
    passed = [loops.flatten(lower.tile(kernel)) for kernel in problem.kernels()]
    assert any(stmt.axis == "step" for kernel in passed for stmt in statements(kernel.body) if isinstance(stmt, For))
    result = problem.run_tile(8, 16, kernels=passed)
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(result[name], plain[name])
    assert_close(result, problem.dense(), BF16)


def test_skipped_blocks_are_not_computed():
    problem = Problem(Spec(16, 16, causal=True), 1, 1, 1, 64, 64)
    all_blocks, visible = tile.Counter(), tile.Counter()
    problem.run_tile(8, 8, listener=all_blocks, kernels=problem.kernels()[:1])
    problem.run_tile(8, 8, listener=visible, kernels=[lower.tile(problem.kernels()[0])])
    assert all_blocks.flops == 64 * visible.flops / 36  # the lower triangle of 8 x 8 blocks


# Faults planted in lowered kernels


FAULTY = [(False, Choice(2, 1, 16, (1, 1))), (False, Choice(2, 1, 16, (2, 1))), (True, Choice(2, 1, 16, (3, 2)))]


def lowered(deterministic, choice):
    """Each lowered kernel with its plan and the arrays before and after it."""
    problem = Problem(Spec(16, 16, BF16, False, deterministic), 1, 1, 1, 70, 70)
    chosen = plans(problem, choice)
    arrays = {**problem.arrays, **problem.outputs(problem.dims() | chosen["attention_backward"].sizes)}
    for kernel in problem.kernels():
        before = copies(arrays)
        tile.run(kernel, chosen[kernel.name].sizes, arrays, problem.scalars)
        yield problem, lower.run(kernel, chosen[kernel.name]), chosen[kernel.name], before, copies(arrays)


def is_caught(kernel, plan, problem, before, after):
    try:
        machine_equals_tile(kernel, plan, problem, before, after)
    except (Hazard, Deadlock, AssertionError):
        return True
    return False


def one_less(body, types):
    """The body with each statement of some types left out in turn, and each wait made too lax."""
    for at, stmt in enumerate(body):
        for inner in one_less(getattr(stmt, "body", ()), types):
            yield (*body[:at], replace(stmt, body=inner), *body[at + 1 :])
        if isinstance(stmt, types):
            yield (*body[:at], *body[at + 1 :])
        if isinstance(stmt, types) and isinstance(stmt, WaitGroup):
            yield (*body[:at], replace(stmt, pending=stmt.pending + 1), *body[at + 1 :])


@pytest.mark.parametrize(("deterministic", "choice"), FAULTY, ids=str)
def test_every_wait_and_barrier_of_a_loop_is_needed(deterministic, choice):
    count = 0
    for problem, kernel, plan, before, after in lowered(deterministic, choice):
        for at, stmt in enumerate(kernel.body):
            for inner in one_less(stmt.body, (WaitGroup, Barrier)) if isinstance(stmt, For) else ():
                body = (*kernel.body[:at], replace(stmt, body=inner), *kernel.body[at + 1 :])
                assert is_caught(kernel.having(body=body), plan, problem, before, after), (
                    f"{kernel.name}, number {count}"
                )
                count += 1
    assert count >= 6


@pytest.mark.parametrize(("deterministic", "choice"), FAULTY, ids=str)
def test_barriers_around_the_loops_are_needed(deterministic, choice):
    for problem, kernel, plan, before, after in lowered(deterministic, choice):
        body = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Barrier))
        assert is_caught(kernel.having(body=body), plan, problem, before, after), kernel.name


@pytest.mark.parametrize(("deterministic", "choice"), FAULTY, ids=str)
def test_every_combination_of_lanes_is_needed(deterministic, choice):
    count = 0
    for problem, kernel, plan, before, after in lowered(deterministic, choice):
        for body in one_less(kernel.body, CombineLanes):
            assert is_caught(kernel.having(body=body), plan, problem, before, after), kernel.name
            count += 1
    assert count >= 3


def test_unfaulted_kernels_are_not_caught():
    for deterministic, choice in FAULTY:
        for problem, kernel, plan, before, after in lowered(deterministic, choice):
            assert not is_caught(kernel, plan, problem, before, after), kernel.name
            same = rewrite_kernel(kernel, lambda stmt: stmt)
            assert same == kernel and rewrite(kernel.body, lambda stmt: stmt) == kernel.body
