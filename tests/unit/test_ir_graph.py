"""The graph: edges, independence, lifetimes and interference of what a body reads and writes."""

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_kernels import STAGES, kernel_of, row

from flashgen.ir import graph
from flashgen.ir.expr import Const, I, J, Var, load
from flashgen.ir.nodes import Copy, Fill, For, If, Let, Map, Space
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import WaitGroup


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
