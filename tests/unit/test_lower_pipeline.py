"""The copy pipeline: each step reads what was copied for it, at every depth, and the waits are right without help."""

from dataclasses import replace

import pytest
from staged_kernels import DEPTHS, PIPELINED, find, machine_of, staged_plan, the_loop, up_to

from flashgen.ir.expr import Const, Load, evaluate, substitute, variables, walk
from flashgen.ir.nodes import For, If, Space, Tile
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import inline_lets, rewrite, statements
from flashgen.lower import pipeline, sm80
from flashgen.machine.sm80 import CommitGroup, CopyTileAsync, CopyTileElements, CopyVectorAsync, MmaSync, WaitGroup
from flashgen.machine.sm80_hazards import hazards
from flashgen.spec import Spec

named = {"ids": str}
COPIES = (CopyTileAsync, CopyTileElements, CopyVectorAsync)


def copies_of(kernel, name):
    return find(kernel, COPIES, lambda stmt: stmt.dst.buffer == name)


@pytest.mark.parametrize("depth", DEPTHS, **named)
@pytest.mark.parametrize("nest", PIPELINED)
def test_each_step_reads_what_was_copied_for_it(nest, depth):
    """Copies and reads as a list of events: the slot that is read holds the copy of that step."""
    machine, plan = machine_of(nest, depth)
    loop = the_loop(machine)
    for steps in (0, 1, 2, 5):
        holds = {}
        for step, stmt in events(machine, steps):
            for place in (*stmt.reads(), *stmt.writes()):
                name, slot = slot_of(machine, place, stmt, loop.axis, step)
                if name in plan.stages and isinstance(stmt, COPIES) and place in stmt.writes():
                    holds[name, slot] = issued_for(stmt, loop, step)
                elif name in plan.stages:
                    assert holds[name, slot] == step, f"{stmt_text(stmt)} in step {step} of {steps}"


def events(machine, steps):
    """(step, statement) in the order of issue; before and after the loop the step is None. Guards are obeyed."""

    def flat(body, step):
        for stmt in body:
            if isinstance(stmt, For):
                for inner in range(steps):
                    yield from flat(stmt.body, inner)
            elif isinstance(stmt, If):
                if taken(stmt, the_loop(machine), step, steps):
                    yield from flat(stmt.body, step)
            else:
                yield step, stmt

    yield from flat(machine.body, None)


def taken(stmt, loop, step, steps):
    """Whether a guard `step + n < stop` holds; other conditions (masks) do."""
    condition = stmt.condition
    if getattr(condition, "y", None) != loop.stop or condition.op != "<":
        return True
    return evaluate_at(condition.x, loop, step) < steps


def evaluate_at(expr, loop, step):
    """A step number, counted from the loop's start."""
    names = {name: Const(0) for name in variables(expr)} | ({} if step is None else {loop.axis: Const(step)})
    return evaluate(substitute(expr, names), {})


def slot_of(machine, place, stmt, axis, step):
    """(buffer, stage) of a place, the stage of a loaded vector from its first index."""
    if isinstance(place, Tile):
        return place.buffer, evaluate_at(place.stage, the_loop(machine), step)
    if isinstance(place, str) and machine.space(place) is Space.SHARED:
        loads = [n for e in stmt.expressions() for n in walk_loads(e, place)]
        staged = len(loads[0].index) > len(machine.buffer(place).shape)
        return place, evaluate_at(loads[0].index[0], the_loop(machine), step) if staged else 0
    return None, 0


def walk_loads(expr, buffer):
    return [node for node in walk(expr) if isinstance(node, Load) and node.buffer == buffer]


def issued_for(stmt, loop, step):
    """The step whose rows a copy brings, from the row of its window."""
    lets = inline_lets(loop.body)
    row = substitute(stmt.src.origin[2], lets)
    names = {name: Const(0) for name in variables(row)} | {"block_q": Const(1), "block_kv": Const(1)}
    names |= {"q_blocks": Const(1000), f"first_{loop.axis}": Const(0)} | (
        {} if step is None else {loop.axis: Const(step)}
    )
    return evaluate(substitute(row, names), {})


@pytest.mark.parametrize("depth", DEPTHS, **named)
@pytest.mark.parametrize("nest", PIPELINED)
def test_stages_are_used_and_commits_balance(nest, depth):
    machine, plan = machine_of(nest, depth)
    loop = the_loop(machine)
    for name, stages in plan.stages.items():
        slots = {stmt.dst.stage for stmt in copies_of(machine, name)}
        assert (slots == {Const(0)}) == (stages == 1)
        assert sum(stmt in statements(loop.body) for stmt in set(copies_of(machine, name))) == 1
    before = machine.body[: machine.body.index(loop)]
    ahead = sum(isinstance(stmt, CommitGroup) for stmt in before)
    assert ahead >= max(depth) - 1
    waits = [stmt.pending for stmt in find(machine, WaitGroup)]
    assert waits and max(waits) <= ahead + sum(isinstance(stmt, CommitGroup) for stmt in loop.body)


@pytest.mark.parametrize("depth", DEPTHS, **named)
@pytest.mark.parametrize("nest", PIPELINED)
def test_every_copy_in_a_group_that_is_committed(nest, depth):
    """A copy is followed by a commit before any wait or the end of its body: none floats into a later group."""
    machine, _ = machine_of(nest, depth)
    for body in (machine.body, the_loop(machine).body):
        open_copies = 0
        for stmt in body:
            if isinstance(stmt, If):
                open_copies += sum(isinstance(inner, COPIES) for inner in stmt.body)
            open_copies = 0 if isinstance(stmt, CommitGroup) else open_copies + isinstance(stmt, COPIES)
            assert not (open_copies and isinstance(stmt, WaitGroup | For | MmaSync))
        assert open_copies == 0


@pytest.mark.parametrize("depth", DEPTHS, **named)
@pytest.mark.parametrize("nest", PIPELINED)
def test_the_pipeline_alone_waits_for_all_that_its_loop_reads(nest, depth):
    """The barrier pass, which would put a wait for everything in its place, has nothing left to do for copies."""
    kernel = PIPELINED[nest]
    plan = staged_plan(kernel, Spec(64, 64), *depth)
    found = hazards(up_to(pipeline.stage_copies, kernel, plan), plan)
    loop_at = next(at for at, stmt in enumerate(machine_of(nest, depth)[0].body) if isinstance(stmt, For))
    late = [hazard for hazard in found if hazard.path[0] == loop_at and hazard.in_flight]
    unseen = [hazard for hazard in found if any(f"reads {name} " in hazard.reason for name in plan.stages)]
    assert late == [] and unseen == []


def test_more_stages_leave_more_in_flight():
    pending = {}
    for stages in (1, 2, 3):
        machine, _ = machine_of("forward", (stages, stages))
        pending[stages] = max(stmt.pending for stmt in find(machine, WaitGroup))
    assert pending[1] < pending[3] and pending[2] <= pending[3]


def test_a_copy_that_nothing_reads_is_refused():
    kernel = up_to(sm80.select, PIPELINED["forward"], plan := staged_plan(PIPELINED["forward"], Spec(64, 64), 1, 1))
    unread = rewrite(kernel.body, lambda stmt: () if isinstance(stmt, MmaSync) and stmt.acc == "s" else stmt)
    with pytest.raises(ValueError, match="k_tile is copied in a loop that does not read it"):
        pipeline.stage_copies(kernel.having(body=unread), plan)


def test_equal_statements_are_told_apart():
    """The second of two equal readers is the last: the slot may not be refilled between them."""
    nest = PIPELINED["forward"]
    plan = staged_plan(nest, Spec(64, 64), 1, 1)
    kernel = up_to(sm80.select, nest, plan)
    loop = the_loop(kernel)
    (product,) = [stmt for stmt in loop.body if isinstance(stmt, MmaSync) and stmt.acc == "s"]
    again = replace(loop, body=(*loop.body, product))
    body = tuple(again if stmt is loop else stmt for stmt in kernel.body)
    order = the_loop(pipeline.stage_copies(kernel.having(body=body), plan)).body
    refill = [at for at, stmt in enumerate(order) if isinstance(stmt, If) and copies_into(stmt.body, "k_tile")]
    products = [at for at, stmt in enumerate(order) if stmt == product]
    assert len(products) == 2 and len(refill) == 1 and refill[0] > products[-1]


def copies_into(body, name):
    return [stmt for stmt in body if isinstance(stmt, COPIES) and stmt.dst.buffer == name]
