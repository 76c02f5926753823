"""Each pass keeps its invariant; waits and barriers are all there, and all needed."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import build, lower
from flashgen.attention import backward, forward, parts
from flashgen.ir import verify
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import NEG_INF, Cast, Const, I, J, Load, Var, evaluate, load, select, substitute, variables, walk
from flashgen.ir.nodes import (
    Accumulate,
    Buffer,
    Copy,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Level,
    Map,
    Note,
    RowReduce,
    Space,
    Tile,
)
from flashgen.ir.printer import kernel_text, stmt_text
from flashgen.ir.visit import inline_lets, rewrite, statements
from flashgen.lower import barriers, loops, masks, operands, pipeline, reduction, sm80
from flashgen.machine.base import (
    Barrier,
    CombineLanes,
    FillFragment,
    MachineStmt,
    MapFragment,
    PackFragment,
    ReduceRows,
    StoreFragment,
)
from flashgen.machine.sm80 import (
    CommitGroup,
    CopyTileAsync,
    CopyTileElements,
    CopyVectorAsync,
    MmaSync,
    Sm80Stmt,
    WaitGroup,
)
from flashgen.machine.sm80_hazards import hazards
from flashgen.machine.verify import machine as verify_machine
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch, with_shared_memory
from flashgen.plan.plan import Candidate, Placement
from flashgen.spec import Spec

ROOMY = with_shared_memory(parse_arch("sm_80"), 512 * 1024)
named = {"ids": str}


def staged_plan(kernel, spec, first, second, split=1):
    """A small plan with a chosen number of stages; it fits by its room."""
    tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
    layouts = dict.fromkeys(tiles, (4 // split, split))
    blocks = {"block_q": 64, "block_kv": 64}
    depths = {"k_tile": first, "v_tile": second}
    if kernel.name == "attention_backward":
        depths = {"q_tile": first, "lse_tile": first, "dout_tile": second, "delta_tile": second}
        layouts["dq_acc"] = (4, 1)
    candidate = Candidate(tuple(blocks.items()), 4, tuple(depths.items()), tuple(layouts.items()))
    assert planner.judge(kernel, ROOMY, planner.head_dims(spec, ROOMY), candidate).rejection == ""
    return planner.make(kernel, spec, ROOMY, candidate)


def up_to(last, kernel, plan):
    """The kernel after a pass of the list."""
    for step in (*lower.TILE_PASSES, *lower.SM80_PASSES):
        kernel = step(kernel, plan)
        if step is last:
            return kernel
    raise AssertionError(f"{last} is no pass")


def find(kernel, kind, *wanted):
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, kind) and all(test(stmt) for test in wanted)]


def the_loop(kernel):
    (found,) = [stmt for stmt in kernel.body if isinstance(stmt, For)]
    return found


# Masks: what is skipped sees nothing, what is not masked is wholly visible


BLOCK = {"block_q": 4, "block_kv": 3}
ROWS = ("q_block", "kv_block")


def visible(causal, lengths, q, kv):
    """One element, by the definition of the mask."""
    seqlen_q, seqlen_k = lengths
    return kv < seqlen_k and (not causal or kv <= q + seqlen_k - seqlen_q)


def blocks(lengths):
    return range(-(-lengths[0] // BLOCK["block_q"])), range(-(-lengths[1] // BLOCK["block_kv"]))


def seen(causal, lengths, q_block, kv_block):
    """Visibility of each element of a tile, rows of queries past the end included."""
    q_rows = range(q_block * BLOCK["block_q"], (q_block + 1) * BLOCK["block_q"])
    kv_rows = range(kv_block * BLOCK["block_kv"], (kv_block + 1) * BLOCK["block_kv"])
    return [visible(causal, lengths, q, kv) for q in q_rows for kv in kv_rows]


def steps_of(kernel, lengths, position):
    """Loop variable -> the environment of each step of the loop over blocks, for one position of the grid."""
    values = {**BLOCK, "seqlen_q": lengths[0], "seqlen_k": lengths[1], "group": 1, "head": 0, "head_kv": 0, **position}
    body = kernel.body
    while True:
        for stmt in body:
            if isinstance(stmt, Let):
                values[stmt.name] = evaluate(stmt.value, values)
        (loop,) = [stmt for stmt in body if isinstance(stmt, For)]
        if loop.axis != "head_in_group":
            break
        values["head_in_group"], body = 0, loop.body
    for step in range(evaluate(loop.start, values), evaluate(loop.stop, values)):
        inner = {**values, loop.axis: step}
        for stmt in loop.body:
            if isinstance(stmt, Let):
                inner[stmt.name] = evaluate(stmt.value, inner)
        yield step, inner, loop


NESTS = {
    "forward": (forward.forward, ROWS),
    "dq": (backward.backward_dq, ROWS),
    "dkdv": (backward.backward, ROWS[::-1]),
}
LENGTHS = [(q, k) for q in (0, 1, 3, 4, 5, 8, 9, 13) for k in (0, 1, 2, 3, 4, 6, 7, 12, 14)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nest", NESTS)
def test_skipped_blocks_see_nothing_and_the_rest_something(nest, causal):
    make, (outer, inner) = NESTS[nest]
    kernel = masks.skip_blocks(make(Spec(8, 8, causal=causal)))
    for lengths in LENGTHS:
        ranges = dict(zip(ROWS, blocks(lengths), strict=True))
        for position in ranges[outer]:
            visited = {step for step, _, _ in steps_of(kernel, lengths, {outer: position})}
            assert visited <= set(ranges[inner])
            for step in ranges[inner]:
                some = any(seen(causal, lengths, **{outer: position, inner: step}))
                assert some == (step in visited), f"{lengths}: {outer} {position}, {inner} {step}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nest", NESTS)
def test_the_guard_holds_exactly_on_boundaries(nest, causal):
    make, (outer, inner) = NESTS[nest]
    kernel = lower.tile(make(Spec(8, 8, causal=causal)))
    masked = {True: 0, False: 0}
    for lengths in LENGTHS:
        for position in dict(zip(ROWS, blocks(lengths), strict=True))[outer]:
            for step, values, loop in steps_of(kernel, lengths, {outer: position}):
                (guard,) = [stmt for stmt in loop.body if isinstance(stmt, If)]
                holds = bool(evaluate(guard.condition, values))
                assert holds != all(seen(causal, lengths, **{outer: position, inner: step}))
                masked[holds] += 1
    assert all(masked.values()), "both kinds of tiles were met"


@pytest.mark.parametrize("transposed", [False, True])
def test_the_mask_itself(transposed):
    mask = parts.visible(Spec(8, 8, causal=True), transposed)
    for lengths in ((5, 7), (7, 5), (3, 3)):
        values = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "q_start": 2, "kv_start": 3}
        for q, kv in [(q, kv) for q in range(4) for kv in range(5)]:
            element = {"i": kv, "j": q} if transposed else {"i": q, "j": kv}
            assert bool(evaluate(mask, {**values, **element})) == visible(True, lengths, 2 + q, 3 + kv)


def test_only_a_mask_of_its_own_tile_is_guarded():
    """s = select(visible, s, -inf) may be left out where nothing is hidden; a map from another tile may not."""
    mask = Var("a") + J < 3
    own = Map("s", select(mask, load("s", I, J), NEG_INF), note="mask")
    other = [
        replace(own, dst="p"),
        replace(own, expr=select(mask, load("s", I, J), Const(0.0))),
        replace(own, expr=select(mask, load("s", I, J) * 2, NEG_INF)),
        replace(own, expr=load("s", I, J)),
    ]
    assert masks.is_mask(own) and not any(masks.is_mask(stmt) for stmt in other)


def test_full_attention_is_masked_by_the_end_of_the_keys_only():
    """No bounds are introduced where they would say what the loop says."""
    for make in (forward.forward, backward.backward, backward.backward_dq):
        kernel = make(Spec(8, 8))
        assert masks.skip_blocks(kernel) == kernel
        assert masks.skip_blocks(make(Spec(8, 8, causal=True))) != make(Spec(8, 8, causal=True))


# Flatten


def visits(body, values):
    """(head_in_group, q_block) of every step, by running loops and Lets."""
    values = dict(values)
    for stmt in body:
        if isinstance(stmt, Let):
            values[stmt.name] = evaluate(stmt.value, values)
        elif isinstance(stmt, For):
            for step in range(evaluate(stmt.start, values), evaluate(stmt.stop, values)):
                yield from visits(stmt.body, {**values, stmt.axis: step})
        elif isinstance(stmt, Gemm) and stmt.acc == "s":
            yield values["head_in_group"], values["q_block"], values["q_start"]


@pytest.mark.parametrize("causal", [False, True])
def test_flatten_visits_the_same_pairs_in_the_same_order(causal):
    nested = masks.skip_blocks(backward.backward(Spec(8, 8, causal=causal)))
    flat = loops.flatten(nested)
    assert len(find(flat, For)) == 1 and len(find(nested, For)) == 2
    for lengths in LENGTHS:
        for group in (1, 3):
            for kv_block in range(4):
                values = {**BLOCK, "seqlen_q": lengths[0], "seqlen_k": lengths[1], "group": group, "head_kv": 1}
                values["kv_block"] = kv_block
                assert list(visits(flat.body, values)) == list(visits(nested.body, values))


def nested(bounds=(), inner_stop=None, start=0, after=()):
    inner = For("b", Const(1), inner_stop or Var("n"), (Note(note="work"),))
    return Kernel("loops", Level.TILE, (), (), (), (For("a", Const(start), Var("m"), (*bounds, inner, *after)),))


@pytest.mark.parametrize(
    "kernel",
    [
        nested(inner_stop=Var("a") + 1),  # a triangle
        nested(bounds=(Let("n", Var("a") * 2),)),
        nested(start=1),
        nested(after=(Note(note="more"),)),
        nested(bounds=(Note(note="first"),)),
    ],
)
def test_what_is_no_rectangle_stays_nested(kernel):
    assert loops.flatten(kernel) == kernel


def test_a_rectangle_of_bounds_is_flattened():
    flat = loops.flatten(nested(bounds=(Let("n", Var("size") * 2),)))
    assert [stmt_text(stmt) for stmt in statements(flat.body)] == [
        "let n = size * 2",
        "let bs = n - 1",
        "for step in 0 .. m * bs:",
        "let a = step // bs",
        "let b = 1 + step % bs",
        "note",
    ]


# Instruction selection


SPEC = Spec(64, 32, causal=True)
ALL = build.everything(SPEC, parse_arch("sm_90")) | build.everything(
    replace(SPEC, deterministic=True, aligned=False), parse_arch("sm_86")
)


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


# Row sums


ZERO = FillFragment("l", Const(0.0))


def sums(*inside, before=(ZERO,)):
    shape = ("rows", "cols")
    buffers = [Buffer(name, shape, F32, Space.REGISTER, warps=(1, 1)) for name in ("p", "q")]
    buffers += [Buffer(name, shape[:1], F32, Space.REGISTER, warps=(1, 1)) for name in ("l", "scale", "m")]
    total = (ReduceRows("l", "sum", "p"), CombineLanes("l", "sum"))
    body = (*before, For("k", Const(0), Const(4), (*inside, *total)), MapFragment("m", load("l", I)))
    return Kernel("sums", Level.MACHINE, (), (), tuple(buffers), body)


def combines(kernel):
    """Where row sums are combined: inside the loop, after it."""
    return sum(isinstance(stmt, CombineLanes) for stmt in the_loop(kernel).body), sum(
        isinstance(stmt, CombineLanes) for stmt in kernel.body
    )


SCALED = MapFragment("l", load("l", I) * load("scale", I))


@pytest.mark.parametrize(
    ("kernel", "after"),
    [
        (sums(), True),
        (sums(SCALED), True),
        (sums(If(Var("k") < 2, (SCALED,))), True),
        (sums(MapFragment("l", load("l", I) + load("scale", I))), False),  # would be added once a lane
        (sums(MapFragment("l", load("l", I) * load("l", I))), False),
        (sums(MapFragment("l", load("scale", I) - load("l", I))), False),
        (sums(MapFragment("l", load("m", I))), False),
        (sums(MapFragment("m", load("l", I))), False),  # read in the loop
        (sums(If(Var("k") < 2, (MapFragment("q", load("p", I, J) / load("l", I)),))), False),
        (sums(FillFragment("l", Const(1.0))), False),
        (sums(before=(FillFragment("l", Const(1.0)),)), False),
        (sums(before=(ZERO, MapFragment("l", load("scale", I)))), False),
        (sums(before=()), False),
    ],
)
def test_combine_after_the_loop_only_where_the_sum_is_linear(kernel, after):
    result = reduction.combine_after_loop(kernel, None)
    assert combines(kernel) == (1, 0)
    assert combines(result) == ((0, 1) if after else (1, 0))
    if after:
        loop_at = result.body.index(the_loop(result))
        assert isinstance(result.body[loop_at + 1], CombineLanes), "right after the loop, before any reader"
    else:
        assert result == kernel


def test_a_maximum_is_combined_in_every_step():
    machine = ALL["attention_forward"].machine
    inside = [stmt.op for stmt in the_loop(machine).body if isinstance(stmt, CombineLanes)]
    assert inside == ["max"] and [s.op for s in machine.body if isinstance(s, CombineLanes)] == ["sum"]


# The copy pipeline


COPIES = (CopyTileAsync, CopyTileElements, CopyVectorAsync)
DEPTHS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3)]
PIPELINED = {
    "forward": forward.forward(Spec(64, 64, causal=True)),
    "backward": backward.backward(Spec(64, 64, causal=True)),
    "backward_dq": backward.backward_dq(Spec(64, 64, deterministic=True)),
}


@cache
def machine_of(nest, depth, split=1):
    kernel = PIPELINED[nest]
    plan = staged_plan(kernel, Spec(64, 64), *depth, split=split)
    return lower.run(kernel, plan), plan


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


# Waits and barriers


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


# The walk that finds hazards


X, Y = Tile("x"), Tile("y")
REGISTERS = [Buffer("s", ("n", "n"), F32, Space.REGISTER, warps=(2, 1))]
REGISTERS += [Buffer(f"out{split}", ("n", "n"), BF16, Space.REGISTER, warps=(2 // split, split)) for split in (1, 2)]
HERE = parts.rows_of("g", Const(0), Const(0))
COPY_X, LANDED = (CopyTileAsync(X, HERE), CommitGroup()), (WaitGroup(0), Barrier())
USE_X = MmaSync("s", X, X, transpose_b=True)
STORE_X, STORE_Y = StoreFragment(X, "out1"), StoreFragment(Y, "out1")


def found(*body, offset=512, stages=1):
    """Reasons of the hazards of a small program on two tiles of 512 bytes; `offset` moves y over x."""
    shared = tuple(Buffer(name, ("n", "n"), BF16, Space.SHARED, stages) for name in "xy")
    everything = (Buffer("g", ("b", "h", "rows", "n"), BF16, Space.GLOBAL), *shared, *REGISTERS)
    kernel = Kernel("walk", Level.MACHINE, (), (), everything, body)
    plan = replace(
        LOWERED["attention_delta"][1],
        shared=tuple(Placement(n, o, 512, stages, 32) for n, o in (("x", 0), ("y", offset))),
    )
    return [hazard.reason for hazard in hazards(kernel, plan)]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ((*COPY_X, *LANDED, USE_X), []),
        ((*COPY_X, USE_X), ["reads x while its copy is in flight"]),
        ((*COPY_X, WaitGroup(0), USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((*COPY_X, Barrier(), WaitGroup(0), USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((COPY_X[0], *LANDED, USE_X), ["reads x while its copy is in flight"]),  # never committed
        ((*COPY_X, WaitGroup(1), Barrier(), USE_X), ["reads x while its copy is in flight"]),
        ((*COPY_X, CommitGroup(), WaitGroup(1), Barrier(), USE_X), []),
        ((STORE_X, USE_X), ["reads x before a barrier has shown it to all warps"]),
        ((STORE_X, Barrier(), USE_X, STORE_X), ["overwrites x while other warps may still read it"]),
        ((STORE_X, Barrier(), USE_X, Barrier(), STORE_X), []),
        ((*COPY_X, *COPY_X, *LANDED, USE_X), ["overwrites x while its copy is in flight"]),
        ((*COPY_X, STORE_X), ["overwrites x while its copy is in flight"]),
        ((*COPY_X, WaitGroup(0), STORE_X), ["overwrites x while other warps may still write it"]),
        ((STORE_X, STORE_X, Barrier(), USE_X), []),  # each thread overwrites its own
        ((STORE_X, StoreFragment(X, "out2")), ["overwrites x while other warps may still write it"]),
        ((USE_X,), ["reads x before anything was written to this stage"]),
    ],
)
def test_hazards_of_small_programs(body, reasons):
    assert found(*body) == reasons


def test_buffers_laid_over_each_other():
    assert found(STORE_X, STORE_Y) == []
    for offset in (0, 256, 511):
        assert found(STORE_X, STORE_Y, offset=offset) == ["overwrites x while other warps may still write it"]
        assert found(STORE_X, Barrier(), STORE_Y, offset=offset) == []
        assert found(*COPY_X, STORE_Y, offset=offset) == ["overwrites x while its copy is in flight"]
        assert found(STORE_X, Barrier(), USE_X, STORE_Y, offset=offset) == [
            "overwrites x while other warps may still read it"
        ]
        lost = found(STORE_X, Barrier(), STORE_Y, Barrier(), USE_X, offset=offset)
        assert lost == ["reads x after y was written over it"]


def test_stages_are_regions_of_their_own():
    step = Var("k")
    copy = CopyTileAsync(Tile("x", step % 2), HERE)
    use = MmaSync("s", Tile("x", step % 2), Tile("x", step % 2), transpose_b=True)
    loop = For("k", Const(0), Var("n"), (copy, CommitGroup(), *LANDED, use))
    assert found(loop, stages=2, offset=1024) == []  # each step fills the slot that the step before did not read
    wrong = replace(loop, body=(*loop.body[:-1], replace(use, b=Tile("x", (step + 1) % 2))))
    assert "reads x before anything was written to this stage" in found(wrong, stages=2, offset=1024)
    single = replace(loop, body=(replace(copy, dst=X), CommitGroup(), *LANDED, USE_X))
    assert found(single) == ["overwrites x while other warps may still read it"]


@pytest.mark.parametrize("kind", [CopyTileAsync, CopyTileElements])
@pytest.mark.parametrize("lands_later", [True, False])
def test_the_walk_asks_the_statement_whether_it_lands_later(monkeypatch, kind, lands_later):
    monkeypatch.setattr(kind, "ASYNCHRONOUS", lands_later)
    copy, use = kind(X, HERE), USE_X
    assert found(copy, CommitGroup(), Barrier(), use) == ["reads x while its copy is in flight"] * lands_later
    assert found(copy, CommitGroup(), *LANDED, use) == []


def test_what_lands_at_its_wait_is_declared_asynchronous():
    kinds = Sm80Stmt.__subclasses__()
    later = {kind for kind in kinds if "landing at its wait" in kind.__doc__}
    assert later == {kind for kind in kinds if kind.ASYNCHRONOUS} == {CopyTileAsync, CopyVectorAsync}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*COPY_X, *LANDED, USE_X, STORE_X, STORE_Y]), max_size=8))
def test_more_barriers_never_make_more_hazards(program):
    crowded = [stmt for item in program for stmt in (Barrier(), item)]
    assert len(found(*crowded)) <= len(found(*program))


# The whole list


@pytest.mark.parametrize("stages", ALL.values(), ids=ALL)
def test_each_pass_leaves_a_verified_kernel_and_a_sentence(stages):
    names = []
    result = lower.run(stages.tile, stages.plan, lambda name, kernel: names.append((name, kernel)))
    steps = (*lower.TILE_PASSES, *lower.SM80_PASSES)
    assert [name for name, _ in names] == [step.__name__ for step in steps]
    assert result == names[-1][1] == stages.machine
    levels = [kernel.level for _, kernel in names]
    assert levels == sorted(levels, key=lambda level: level is Level.MACHINE)
    for step in steps:
        first, rest = step.__doc__.split("\n", 1)
        assert first.endswith(".") and "Invariant: " in rest, step.__name__


def test_passes_do_not_touch_their_input():
    nest, plan = PIPELINED["backward"], LOWERED["backward-(1, 1)"][1]
    before = kernel_text(nest)
    lower.run(nest, plan)
    assert kernel_text(nest) == before


def test_a_kernel_that_was_not_lowered_is_refused():
    stages = ALL["attention_forward"]
    with pytest.raises(verify.VerifyError, match="still at the TILE level"):
        verify_machine(stages.tile, stages.plan)
    with pytest.raises(verify.VerifyError, match="Accumulate was not selected"):
        stray = (*stages.machine.body, Accumulate(parts.rows_of("o", Const(0), Const(0)), "o_acc"))
        verify_machine(stages.machine.having(body=stray), stages.plan)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("s", {"warps": (1, 2)}, "rows of s are spread over several warps"),
        ("p_operand", {"warps": (1, 1)}, "operand p_operand is divided among the warps otherwise than o_acc"),
        ("o_acc", {"warps": (64, 1)}, "is no multiple of 16 x 8 for each of its warps"),
        ("v_tile", {"shape": ("block_kv", "head_dim")}, "has disagreeing shapes"),
    ],
)
def test_products_must_fit_their_instructions(name, change, reason):
    stages = ALL["attention_forward"]
    wrong = stages.machine.with_buffer(replace(stages.machine.buffer(name), **change))
    with pytest.raises(verify.VerifyError, match=reason):
        verify_machine(wrong, stages.plan)


def test_each_tile_pass_is_verified_and_the_machine_kernel_once(monkeypatch):
    """The docstring of `lower.run`: every kernel of TILE level that a pass leaves, and the last of all."""
    stages = build.forward(SPEC, parse_arch("sm_80"))[0]
    verified, shown = [], []
    monkeypatch.setattr(verify, "tile", verified.append)
    monkeypatch.setattr(lower, "verify_machine", lambda kernel, plan: verified.append(kernel))
    machine = lower.run(stages.tile, stages.plan, lambda name, kernel: shown.append(kernel))
    tiles = [kernel for kernel in shown if kernel.level is Level.TILE]
    assert len(tiles) >= len(lower.TILE_PASSES) and machine is shown[-1]
    assert [id(kernel) for kernel in verified] == [id(kernel) for kernel in (*tiles, machine)]
