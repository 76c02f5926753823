"""Printer, verifier, graph and visitors of the IR, on the kernels of attention and on bodies made for the purpose."""

from dataclasses import fields, is_dataclass, replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import build
from flashgen.attention import backward, forward
from flashgen.ir import graph, verify
from flashgen.ir.dtype import BF16, F16, F32, I32
from flashgen.ir.expr import Cast, Const, Expr, I, J, Var, load, text
from flashgen.ir.nodes import (
    Accumulate,
    Axis,
    Buffer,
    Copy,
    Fill,
    For,
    Gemm,
    If,
    Kernel,
    Let,
    Level,
    Map,
    Note,
    RowReduce,
    Scalar,
    Space,
    Tile,
    Window,
    name_of,
)
from flashgen.ir.printer import kernel_text, place_text, stmt_text
from flashgen.ir.visit import inline_lets, rewrite, rewrite_kernel, statements, substitute_stmt
from flashgen.machine.base import Barrier, MapFragment
from flashgen.machine.sm80 import CopyTileAsync, MmaSync, WaitGroup
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

SPECS = [Spec(64, 32, causal=True), Spec(32, 32, deterministic=True, aligned=False)]
NESTS = [make(spec) for spec in SPECS for make in (forward.forward, backward.delta, backward.backward)]
NESTS += [backward.convert_dq(SPECS[0]), backward.backward_dq(SPECS[1])]
STAGES = [stages for spec in SPECS for stages in build.everything(spec, parse_arch("sm_90")).values()]
KERNELS = [*NESTS, *(stages.machine for stages in STAGES)]
named = {"ids": lambda kernel: f"{kernel.name}-{kernel.level.name}"}


def matrix(name, *shape, space=Space.REGISTER, dtype=F32):
    return Buffer(name, shape, dtype, space)


def kernel_of(*body, level=Level.TILE, extra=()):
    """A kernel with x, y: r x c and v, w: r in registers, t: r x c shared, and the global g."""
    buffers = [matrix(name, "r", "c") for name in ("x", "y", "z")] + [matrix(name, "r") for name in ("v", "w")]
    buffers += [matrix("sq", "r", "r"), matrix("h", "r", "c", dtype=BF16)]
    buffers += [matrix("t", "r", "c", space=Space.SHARED, dtype=BF16), matrix("tv", "r", space=Space.SHARED)]
    buffers += [matrix("g", "batches", "heads", "rows", "c", space=Space.GLOBAL, dtype=BF16)]
    scalars = (Scalar("rows", I32), Scalar("scale", F32))
    return Kernel("small", level, scalars, (Axis("block", Var("rows")),), (*buffers, *extra), body)


# Printer


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_a_line_a_statement_and_every_name(kernel):
    printed = kernel_text(kernel)
    lines = printed.splitlines()
    assert printed.endswith("\n") and not printed.endswith("\n\n")
    header = 1 + bool(kernel.note) + 1 + len(kernel.axes) + len(kernel.buffers)
    assert len(lines) == header + sum(1 for _ in statements(kernel.body))
    assert all(line == line.rstrip() for line in lines)
    for buffer in kernel.buffers:
        assert sum(f" {buffer.name}: " in line for line in lines) == 1
    assert kernel_text(kernel) == printed


def changed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, Expr):
        return value + Var("other")
    if isinstance(value, Window):
        return replace(value, origin=(*value.origin[:-1], changed(value.origin[-1])))
    if isinstance(value, Tile):
        return replace(value, stage=changed(value.stage))
    if isinstance(value, tuple):
        return (*value, Note(note="more")) if value and is_dataclass(value[0]) else (*value, 7)
    return value + ("_other" if isinstance(value, str) else 1)


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_no_field_of_a_statement_is_left_out_of_the_text(kernel):
    printed = kernel_text(kernel)
    for at, stmt in enumerate(kernel.body):
        for stmt_field in fields(stmt):
            other = replace(stmt, **{stmt_field.name: changed(getattr(stmt, stmt_field.name))})
            body = (*kernel.body[:at], other, *kernel.body[at + 1 :])
            assert kernel_text(kernel.having(body=body)) != printed, f"{type(stmt).__name__}.{stmt_field.name}"


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("buffers", {"name": "other"}),
        ("buffers", {"shape": ("r",)}),
        ("buffers", {"dtype": F16}),
        ("buffers", {"space": Space.SHARED}),
        ("buffers", {"stages": 2}),
        ("buffers", {"warps": (2, 1)}),
        ("buffers", {"layout_of": "y"}),
        ("scalars", {"name": "other"}),
        ("scalars", {"dtype": F16}),
        ("axes", {"name": "other"}),
        ("axes", {"extent": Const(1)}),
        ("axes", {"longest_first": True}),
    ],
)
def test_no_field_of_a_declaration_is_left_out_of_the_text(part, change):
    kernel = kernel_of()
    items = list(getattr(kernel, part))
    other = kernel.having(**{part: (replace(items[0], **change), *items[1:])})
    assert kernel_text(other) != kernel_text(kernel)


def test_name_level_and_note_are_printed():
    kernel = kernel_of()
    for change in ({"name": "other"}, {"level": Level.MACHINE}, {"note": "why"}):
        assert kernel_text(kernel.having(**change)) != kernel_text(kernel)


@pytest.mark.parametrize(
    ("stmt", "expected"),
    [
        (For("k", Const(0), Var("n"), ()), "for k in 0 .. n:"),
        (If(Var("a") < 3, ()), "if a < 3:"),
        (Let("a", Var("b") * 2), "let a = b * 2"),
        (Copy("t", Window("g", (Const(0), Var("h"), Var("s")))), "t = copy g[0, h, s]"),
        (Copy(Tile("t", Var("k") % 2), "x"), "t@k % 2 = copy x"),
        (Fill("x", Const(0.0)), "x = fill 0.0"),
        (Gemm("x", "t", "u", transpose_a=True, accumulate=True), "x += gemm t^T, u"),
        (Gemm("x", "t", "u", transpose_b=True), "x = gemm t, u^T"),
        (Map("x", load("y", I, J) * 2), "x = map y[i, j] * 2"),
        (RowReduce("v", "max", "x"), "v = max(v, rows of x)"),
        (Accumulate(Window("g", (Const(0),)), "x"), "g[0] += atomically x"),
        (Barrier(), "barrier"),
        (WaitGroup(2), "wait_group pending=2"),
        (CopyTileAsync(Tile("t", Const(1)), Window("g", (Var("s"),))), "copy_tile_async t@1, src=g[s]"),
    ],
)
def test_text_of_each_statement(stmt, expected):
    assert stmt_text(stmt) == expected


def test_places():
    assert [place_text(place) for place in ("x", Tile("x"), Tile("x", Var("s")))] == ["x", "x", "x@s"]
    assert {name_of(place) for place in ("x", Tile("x"), Window("x", ()))} == {"x"}


# Statements say what they touch


def test_reads_and_writes_come_from_fields_and_expressions():
    stmt = MapFragment("x", load("y", I, J) * load("v", I) + load("y", I, J))
    assert (stmt.writes(), stmt.reads()) == (("x",), ("y", "v"))
    product = MmaSync("x", Tile("t"), Tile("t", Var("s")), accumulate=True)
    assert product.writes() == ("x",) and product.reads() == (Tile("t"), Tile("t", Var("s")), "x")
    assert "x" not in replace(product, accumulate=False).reads()
    assert list(product.expressions()) == [Const(0), Var("s")]
    assert RowReduce("v", "sum", "x").reads() == ("x", "v")
    assert Copy("t", Window("g", (load("n", I), Var("s")))).reads() == (Window("g", (load("n", I), Var("s"))), "n")


# Verifier


@pytest.mark.parametrize("nest", NESTS, **named)
def test_the_nests_are_well_formed(nest):
    verify.tile(nest)


def row(start):
    return Window("g", (Const(0), Const(0), start))


READY = (Fill("x", Const(0.0)), Fill("v", Const(0.0)), Copy("t", row(Const(0))))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((Map("x", load("y", I, J)),), "y is read before it is written"),
        ((Gemm("x", "t", "t", accumulate=True),), "t is read before it is written"),
        ((*READY, Gemm("sq", "t", "t")), "disagreeing shapes"),
        ((*READY, Gemm("x", "t", "t", transpose_b=True)), "disagreeing shapes"),
        ((*READY, Gemm("sq", "t", "t", transpose_b=True, accumulate=True)), "sq is read before it is written"),
        ((Copy("t", row(Var("start"))),), "start is used before it is bound"),
        ((Copy("t", row(Var("start"))), Let("start", Const(0))), "start is used before it is bound"),
        ((If(Const(True), (Let("a", Const(0)),)), Let("b", Var("a"))), "a is used before it is bound"),
        ((For("k", Const(0), Const(2), (Let("a", Var("k")),)), Let("b", Var("k"))), "k is used before it is bound"),
        ((For("k", Const(0), Var("k"), ()),), "k is used before it is bound"),
        ((Let("b", Var("heads")),), "heads is used before it is bound"),  # a global's dimension is no constant
        ((Fill("nowhere", Const(0.0)),), "nowhere is not declared"),
        ((Map("x", load("nowhere", I, J)),), "nowhere is not declared"),
        ((*READY, Map("h", load("x", I, J))), "h must be cast"),
        ((*READY, Map("y", Cast(BF16, load("x", I, J)))), "y must be cast"),
        ((Barrier(),), "Barrier is no TILE statement"),
        ((If(Const(True), (WaitGroup(0),)),), "WaitGroup is no TILE statement"),
    ],
)
def test_each_rule_is_enforced(body, reason):
    with pytest.raises(verify.VerifyError, match=reason):
        verify.tile(kernel_of(*body))


def test_what_the_rules_allow():
    body = (
        *READY,
        Let("start", Var("block") * Var("r")),
        For("k", Const(0), Var("rows"), (Copy("t", row(Var("start") + Var("k"))), Fill("y", Const(0.0)))),
        Gemm("sq", "t", "t", transpose_b=True),
        Map("h", Cast(BF16, load("y", I, J) * Var("scale"))),
        If(Var("start") < Var("rows"), (RowReduce("v", "max", "x"),)),
    )
    verify.tile(kernel_of(*body))


def test_a_buffer_declared_twice():
    with pytest.raises(verify.VerifyError, match="x is declared twice"):
        verify.tile(kernel_of(extra=(matrix("x", "r"),)))


# Graph


def edges(body):
    found = graph.dataflow(body).edges(data=True)
    return {(before, after, edge["kind"], edge["buffer"]) for before, after, edge in found}


def test_edges_of_a_small_body():
    body = (
        Fill("x", Const(0.0)),
        Map("y", load("x", I, J)),
        Map("x", load("z", I, J)),
        For("k", Const(0), Const(2), (Map("z", load("y", I, J)),)),
    )
    assert edges(body) == {
        (0, 1, "raw", "x"),
        (0, 2, "waw", "x"),
        (1, 2, "war", "x"),
        (1, 3, "raw", "y"),
        (2, 3, "war", "z"),
    }


def test_lets_and_windows_are_names_too():
    body = (Let("start", Const(0)), Copy("t", row(Var("start"))), Let("start", Const(1)))
    assert edges(body) == {(0, 1, "raw", "start"), (0, 2, "waw", "start"), (1, 2, "war", "start")}


@pytest.mark.parametrize("stages", STAGES, ids=lambda stages: stages.tile.name)
def test_edges_point_forward(stages):
    for body in (stages.tile.body, stages.machine.body):
        found = graph.dataflow(body)
        assert nx.is_directed_acyclic_graph(found) and len(found) == len(body)
        assert all(before < after for before, after in found.edges())


def test_nothing_passes_a_barrier():
    body = (Fill("x", Const(0.0)), Barrier(), Fill("y", Const(0.0)), If(Const(True), (WaitGroup(0),)))
    assert edges(body) == {(*pair, "order", "") for pair in [(0, 1), (1, 2), (1, 3), (0, 3), (2, 3)]}
    assert not graph.independent(body, 0, 1) and not graph.independent(body, 0, 2) and not graph.independent(body, 2, 3)


def test_readers_follow_the_value():
    body = (
        Map("y", load("x", I, J)),  # before the first write: reads another value
        Fill("x", Const(0.0)),
        Map("y", load("x", I, J)),
        If(Const(True), (Map("z", load("x", I, J)),)),
        Map("z", load("y", I, J)),
    )
    assert graph.readers(body, "x") == [2, 3] and graph.readers(body, "y") == [4]
    assert graph.readers(body, "w") == []


BUFFERS = ("a", "b", "c", "d")
maps = st.builds(lambda dst, x, y: Map(dst, load(x, I) + load(y, I)), *(st.sampled_from(BUFFERS),) * 3)


def meaning(body, labels):
    """Symbolic execution: what each buffer holds at the end, every statement being a function of its own."""
    state = {name: name for name in BUFFERS}
    for stmt, label in zip(body, labels, strict=True):
        state[stmt.dst] = (label, *(state[name] for name in stmt.reads()))
    return state


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_independent_statements_may_change_places(data):
    body = data.draw(st.lists(maps, min_size=2, max_size=6))
    one, other = data.draw(st.lists(st.integers(0, len(body) - 1), min_size=2, max_size=2, unique=True))
    labels = list(range(len(body)))
    before = meaning(body, labels)
    for items in (body_swapped := list(body), labels):
        items[one], items[other] = items[other], items[one]
    free = graph.independent(tuple(body), one, other)
    assert free == graph.independent(tuple(body), other, one)
    assert not free or meaning(body_swapped, labels) == before


@given(maps, maps)
def test_neighbours_are_tied_exactly_where_they_share_what_one_writes(one, other):
    shared = one.dst == other.dst or one.dst in other.reads() or other.dst in one.reads()
    assert graph.independent((one, other), 0, 1) == (not shared)


def test_live_intervals_of_a_straight_body():
    body = (Fill("x", Const(0.0)), Map("y", load("x", I, J)), Map("x", load("y", I, J)), Map("z", load("x", I, J)))
    assert graph.live_intervals(kernel_of(*body), Space.REGISTER) == {"x": (0, 3), "y": (1, 2), "z": (3, 3)}


def test_live_intervals_around_a_loop():
    inside = (
        Copy("t", row(Const(0))),  # filled ahead: lives through the loop
        Fill("y", Const(0.0)),  # of this step only
        Map("y", load("y", I, J)),
        Map("x", load("x", I, J)),  # carried, and read afterwards
        Map("w", load("w", I)),  # carried alone
        Fill("z", Const(0.0)),  # leaves the loop
    )
    body = (
        Fill("v", Const(0.0)),
        Fill("x", Const(0.0)),
        For("k", Const(0), Const(2), inside),
        Map("sq", load("x", I, J)),
    )
    kernel = kernel_of(*body, Map("h", load("z", I, J)))
    assert graph.live_intervals(kernel, Space.SHARED) == {"t": (2, 7)}
    assert graph.live_intervals(kernel, Space.REGISTER) == {
        **{"v": (0, 0), "x": (1, 8), "y": (3, 4), "w": (2, 7), "z": (2, 9), "sq": (8, 8), "h": (9, 9)}
    }


def test_interference_is_being_alive_together():
    body = (Copy("t", row(Const(0))), Map("x", load("t", I, J)), Copy("tv", "v"), Map("v", load("tv", I)))
    apart = graph.interference(kernel_of(Fill("v", Const(0.0)), *body), Space.SHARED)
    assert set(apart.nodes) == {"t", "tv"} and not apart.edges
    loop = graph.interference(kernel_of(For("k", Const(0), Const(2), body)), Space.SHARED)
    assert set(map(frozenset, loop.edges)) == {frozenset({"t", "tv"})}
    same = graph.interference(kernel_of(*body[:1], Copy("tv", "t"), *body[3:]), Space.SHARED)
    assert same.edges, "a statement that reads the one and writes the other needs both"


# Visitors


def test_statements_come_in_program_order():
    inner = If(Const(True), (Note(note="b"), Note(note="c")))
    body = (Note(note="a"), For("k", Const(0), Const(1), (inner,)), Note(note="d"))
    assert [stmt.note for stmt in statements(body) if isinstance(stmt, Note)] == list("abcd")
    assert sum(1 for _ in statements(body)) == 6


def test_rewrite_goes_inside_first_and_may_drop_or_multiply():
    body = (For("k", Const(0), Const(1), (Note(note="a"), Note(note="b"))), Note(note="a"))
    seen = []

    def change(stmt):
        seen.append(stmt_text(stmt) + stmt.note)
        return () if stmt.note == "a" else (stmt, stmt) if stmt.note == "b" else stmt

    result = rewrite(body, change)
    assert result == (replace(body[0], body=(Note(note="b"), Note(note="b"))),)
    assert seen == ["notea", "noteb", "for k in 0 .. 1:", "notea"]


@pytest.mark.parametrize("kernel", KERNELS, **named)
def test_rewriting_nothing_changes_nothing(kernel):
    assert rewrite_kernel(kernel, lambda stmt: stmt) == kernel
    assert all(substitute_stmt(stmt, {}) == stmt for stmt in kernel.body)


def test_substitution_reaches_every_expression():
    values = {"a": Const(5)}
    window = Window("g", (Var("a"), Const(0), Var("a") + 1))
    loop = For(
        "k", Var("a"), Var("a") * 2, (Copy(Tile("t", Var("a") % 2), window), Map("x", load("y", I, J) * Var("a")))
    )
    result = substitute_stmt(loop, values)
    assert stmt_text(result) == "for k in 5 .. 10:"
    assert [stmt_text(stmt) for stmt in result.body] == ["t@1 = copy g[5, 0, 6]", "x = map y[i, j] * 5"]


def test_inlined_lets_see_the_earlier_ones():
    body = (Let("a", Var("k") * 2), Note(), Let("b", Var("a") + 1), Let("a", Var("b")))
    assert {name: text(value) for name, value in inline_lets(body).items()} == {"a": "k * 2 + 1", "b": "k * 2 + 1"}


def test_replacing_and_adding_buffers():
    kernel = kernel_of()
    staged = kernel.with_buffer(replace(kernel.buffer("t"), stages=3))
    assert staged.buffer("t").stages == 3 and len(staged.buffers) == len(kernel.buffers)
    assert len(kernel.with_buffer(matrix("new", "r")).buffers) == len(kernel.buffers) + 1
    with pytest.raises(KeyError, match="kernel small has no buffer nowhere"):
        kernel.buffer("nowhere")
