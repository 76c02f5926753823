"""Waits and barriers are all there, and all needed."""

from dataclasses import replace

import pytest
from staged_kernels import ALL, DEPTHS, PIPELINED, find, machine_of

from flashgen.ir import verify
from flashgen.ir.nodes import For
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import rewrite
from flashgen.lower import barriers
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import MmaSync, WaitGroup
from flashgen.machine.sm80_hazards import hazards
from flashgen.machine.verify import machine as verify_machine


def lowered_kernels():
    """Kernels of both directions, with the planner's plans and with every depth of the pipeline."""
    for name, stages in ALL.items():
        yield name, stages.machine, stages.plan
    for nest in PIPELINED:
        for depth in DEPTHS:
            yield f"{nest}-{depth}", *machine_of(nest, depth)
    yield "backward-split", *machine_of("backward", (2, 1), split=2)


LOWERED = {name: (kernel, plan) for name, kernel, plan in lowered_kernels()}


def weaker(body):
    """(body, what): one Barrier or WaitGroup less, or a WaitGroup that lets one group more be in flight."""
    for at, stmt in enumerate(body):
        before, after = body[:at], body[at + 1 :]
        for inner, what in weaker(getattr(stmt, "body", ())):
            yield (*before, replace(stmt, body=inner), *after), what
        if isinstance(stmt, Barrier | WaitGroup):
            yield (*before, *after), f"no {stmt_text(stmt)}, {neighbour(after)}"
        if isinstance(stmt, WaitGroup):
            yield (
                (*before, replace(stmt, pending=stmt.pending + 1), *after),
                f"lax {stmt_text(stmt)}, {neighbour(after)}",
            )


def neighbour(after):
    return after[0].note or stmt_text(after[0]).split()[0] if after else "end"


# Stricter than it must be, at no cost: behind the loop all that may be in flight are groups without copies, or where
# the loop has no steps, groups that were never needed. The barrier pass waits for all of them.
SLACK = {"lax wait_group pending=0, nothing is in flight any more"}


@pytest.mark.parametrize("name", LOWERED)
def test_every_wait_and_barrier_is_there_and_needed(name):
    kernel, plan = LOWERED[name]
    assert hazards(kernel, plan) == []
    needless = [what for body, what in weaker(kernel.body) if not hazards(kernel.having(body=body), plan)]
    assert set(needless) <= SLACK, needless


def test_the_faults_planted_above_are_many():
    counts = [sum(1 for _ in weaker(kernel.body)) for kernel, _ in LOWERED.values()]
    assert min(counts) >= 1 and sum(counts) > 150
    with_loop = [sum(1 for _ in weaker(kernel.body)) for kernel, _ in LOWERED.values() if find(kernel, For)]
    assert min(with_loop) >= 3


@pytest.mark.parametrize("name", LOWERED)
def test_the_verifier_refuses_a_kernel_without_its_waits(name):
    kernel, plan = LOWERED[name]
    verify_machine(kernel, plan)
    bare = rewrite(kernel.body, lambda stmt: () if isinstance(stmt, Barrier | WaitGroup) else stmt)
    if bare != kernel.body:
        with pytest.raises(verify.VerifyError, match=f"{kernel.name}: .*(before a barrier|in flight|may still)"):
            verify_machine(kernel.having(body=bare), plan)


def test_barriers_are_inserted_until_nothing_is_left_and_none_too_many():
    kernel, plan = LOWERED["backward-(2, 1)"]
    bare = kernel.having(body=rewrite(kernel.body, lambda stmt: () if isinstance(stmt, Barrier) else stmt))
    mended = barriers.insert(bare, plan)
    assert hazards(bare, plan) != [] and hazards(mended, plan) == []
    crowded = rewrite(kernel.body, lambda stmt: (Barrier(), stmt) if isinstance(stmt, MmaSync) else stmt)
    thinned = barriers.drop_redundant(kernel.having(body=crowded), plan)
    assert len(find(thinned, Barrier)) <= len(find(kernel, Barrier))
    assert hazards(thinned, plan) == []
