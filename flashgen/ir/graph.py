"""The dataflow graph of a statement list: what must stay before what, and which buffers are alive together.

Nodes are positions in the list; an edge a -> b says why b stays behind a ("raw", "war", "waw") and through which
buffer; "order" where one of the two synchronises. A statement with a body (For, If) counts as one node with all that
its body touches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from flashgen.ir.expr import variables
from flashgen.ir.nodes import For, Kernel, Space, Stmt, name_of
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import Body, statements

if TYPE_CHECKING:
    import networkx as nx

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Access:
    """The names that a statement writes and reads: buffers, and Lets by their name."""

    writes: frozenset[str]
    reads: frozenset[str]


def access(stmt: Stmt) -> Access:
    """What a statement and its body touch."""
    writes: set[str] = set()
    reads: set[str] = set()
    for inner in statements((stmt,)):
        writes |= {name_of(place) for place in inner.writes()}
        reads |= {name_of(place) for place in inner.reads()}
        for expr in inner.expressions():
            reads |= variables(expr)
        writes |= set(inner.assigns())
    return Access(frozenset(writes), frozenset(reads))


def dataflow(body: Body) -> nx.MultiDiGraph:
    """The dependence graph of a statement list in program order."""
    import networkx as nx

    graph = nx.MultiDiGraph()
    touched = [access(stmt) for stmt in body]
    for here, stmt in enumerate(body):
        graph.add_node(here, text=stmt_text(stmt))
        for before in range(here):
            for kind, names in _conflicts(touched[before], touched[here]).items():
                for name in sorted(names):
                    graph.add_edge(before, here, kind=kind, buffer=name)
            if orders(body[before]) or orders(stmt):
                graph.add_edge(before, here, kind="order", buffer="")
    return graph


def orders(stmt: Stmt) -> bool:
    """True for a statement that other statements may not pass: a barrier, a wait, a commit, or what holds one."""
    return any(inner.ORDERS for inner in statements((stmt,)))


def _conflicts(before: Access, after: Access) -> dict[str, frozenset[str]]:
    return {
        "raw": before.writes & after.reads,
        "war": before.reads & after.writes,
        "waw": before.writes & after.writes,
    }


def readers(body: Body, buffer: str) -> list[int]:
    """Positions of the statements that read a buffer, in program order, found along the graph's raw edges."""
    graph = dataflow(body)
    writers = [node for node in graph if buffer in access(body[node]).writes]
    found = {
        target
        for writer in writers
        for _, target, edge in graph.out_edges(writer, data=True)
        if edge["kind"] == "raw" and edge["buffer"] == buffer
    }
    return sorted(found)


def ties(body: Body, first: int, second: int) -> list[tuple[int, int, str, str]]:
    """Edges (before, after, kind, buffer) that two statements would turn round if they changed places.

    The one must not lead to anything from itself up to the other, nor the other come from anything in between.
    """
    low, high = min(first, second), max(first, second)
    edges = dataflow(body).edges(data=True)
    return [
        (before, after, edge["kind"], edge["buffer"])
        for before, after, edge in edges
        if low <= before and after <= high and (before == low or after == high)
    ]


def independent(body: Body, first: int, second: int) -> bool:
    """True where two statements may change places."""
    return not ties(body, first, second)


def remembered(function: Callable[Concatenate[Kernel, P], T]) -> Callable[Concatenate[Kernel, P], T]:
    """Results are kept on the kernel, which never changes: the planner asks the same for each of its candidates."""

    @wraps(function)
    def ask(kernel: Kernel, *args: P.args, **named: P.kwargs) -> T:
        answers = vars(kernel).setdefault("_answers", {})
        question = (function, args, *named.items())
        if question not in answers:
            answers[question] = function(kernel, *args, **named)
        return answers[question]

    return ask


@remembered
def live_intervals(kernel: Kernel, space: Space) -> dict[str, tuple[int, int]]:
    """First and last position at which each buffer of a space is needed, numbering statements in program order.

    A buffer that a loop touches and that is alive around it (its value enters, leaves, or is carried from step to
    step) is needed for the whole loop. Shared tiles copied in a loop are filled ahead, so they too take the whole loop.
    """
    order: list[tuple[Stmt, tuple[int, int] | None]] = []
    _number(kernel.body, None, order)
    spans: dict[str, list[int]] = {}
    names = {buffer.name for buffer in kernel.buffers if buffer.space is space}
    first_is_read: dict[str, bool] = {}
    for position, (stmt, _) in enumerate(order):
        touched = {name_of(place) for place in (*stmt.writes(), *stmt.reads())} & names
        for name in touched:
            first_is_read.setdefault(name, name in {name_of(place) for place in stmt.reads()})
            spans.setdefault(name, []).append(position)
    result = {}
    loops = {loop for _, loop in order if loop}
    for name, positions in spans.items():
        low, high = positions[0], positions[-1]
        for first, last in loops:
            inside = [position for position in positions if first <= position <= last]
            carried = space is Space.SHARED or first_is_read[name] or low < first or high > last
            if inside and carried:
                low, high = min(low, first), max(high, last)
        result[name] = (low, high)
    return result


def _number(body: Body, loop: tuple[int, int] | None, order: list) -> None:
    """Append leaf statements with the span of the outermost loop around each."""
    for stmt in body:
        inner = getattr(stmt, "body", None)
        if inner is None:
            order.append((stmt, loop))
            continue
        span = loop
        if isinstance(stmt, For) and loop is None:
            start = len(order)
            leaves = sum(1 for leaf in statements(inner) if not hasattr(leaf, "body"))
            span = (start, start + leaves - 1)
        _number(inner, span, order)


@remembered
def interference(kernel: Kernel, space: Space) -> nx.Graph:
    """Buffers of a space as nodes, an edge between two that are alive together."""
    import networkx as nx

    graph = nx.Graph()
    spans = live_intervals(kernel, space)
    names = [buffer.name for buffer in kernel.buffers if buffer.name in spans]
    graph.add_nodes_from(names)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            if spans[name][0] <= spans[other][1] and spans[other][0] <= spans[name][1]:
                graph.add_edge(name, other)
    return graph
