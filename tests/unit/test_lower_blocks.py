"""Loops over blocks: what is skipped sees nothing, what is not masked is wholly visible, flattening keeps the order."""

from dataclasses import replace

import pytest
from staged_kernels import find

import flashgen
from flashgen import lower, trace
from flashgen.attention import backward, forward, parts
from flashgen.ir.expr import NEG_INF, Const, I, J, Var, evaluate, load, select
from flashgen.ir.nodes import For, Gemm, If, Kernel, Let, Level, Map, Note
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import statements
from flashgen.lower import loops, masks
from flashgen.spec import Spec

BLOCK = {"block_q": 4, "block_kv": 3}
ROWS = ("q_block", "kv_block")


# Masks


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


@pytest.mark.parametrize("left", [1, 4, 7])
def test_each_side_of_a_window_is_guarded_by_itself(left):
    spec = Spec(8, 8, causal=True, mask=trace.mask(flashgen.masks.window(left, 0)))
    kernel = masks.mask_sides(lower.tile(forward.forward(spec)))
    met = set()
    for seqlen_q, seqlen_k in LENGTHS:
        for q_block in blocks((seqlen_q, seqlen_k))[0]:
            for step, values, loop in steps_of(kernel, (seqlen_q, seqlen_k), {"q_block": q_block}):
                ending, beginning = [bool(evaluate(s.condition, values)) for s in loop.body if isinstance(s, If)]
                pairs = [(q_block * 4 + i + seqlen_k - seqlen_q, step * 3 + j) for i in range(4) for j in range(3)]
                assert ending == any(kv > q or kv >= seqlen_k for q, kv in pairs)
                assert beginning == any(kv < q - left for q, kv in pairs)
                met.add((ending, beginning))
    assert {(True, False), (False, True)} <= met


@pytest.mark.parametrize("packed", [2, 4])
def test_packed_tiles_visit_what_their_positions_see(packed):
    """A tile of 4 rows has 4 / packed queries of each head, and visits no more blocks than these see."""
    kernel = masks.skip_blocks(forward.forward(Spec(8, 8, causal=True, packed=packed)))
    rows = BLOCK["block_q"] // packed
    for lengths in LENGTHS:
        for q_block in range(-(-lengths[0] // rows)):
            queries = range(q_block * rows, (q_block + 1) * rows)
            steps = steps_of(kernel, lengths, {"q_block": q_block, "head_block": 0})
            wanted = [
                step
                for step in blocks(lengths)[1]
                if any(visible(True, lengths, q, 3 * step + j) for q in queries for j in range(3))
            ]
            assert [step for step, _, _ in steps] == wanted, f"{lengths}: block {q_block}"


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
