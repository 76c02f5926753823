"""Changing the order of statements: what a schedule may do by hand, refused where the dataflow graph forbids it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flashgen.ir.graph import ties
from flashgen.ir.nodes import Kernel, Stmt
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import Body

Where = int | Callable[[Stmt], bool]
Path = tuple[int, ...]

KINDS = {"raw": "reads what was written", "war": "overwrites what was read", "waw": "overwrites what was written"}


class OrderError(ValueError):
    """Two statements do not change places: the graph ties them, or they were not found."""


def swap(kernel: Kernel, first: Where, second: Where) -> Kernel:
    """The kernel with two statements of one body exchanged.

    Each is given by its position in the kernel's body, or by a predicate that holds for it alone in some body.
    Invariant: no edge of the body's dataflow graph is turned round.
    """
    path, body, one, other = _find(kernel, first, second)
    found = ties(body, one, other)
    if found:
        raise OrderError(_refusal(kernel, body, one, other, found[0]))
    order = list(body)
    order[one], order[other] = order[other], order[one]
    return kernel.having(body=_put(kernel.body, path, tuple(order)))


def _find(kernel: Kernel, first: Where, second: Where) -> tuple[Path, Body, int, int]:
    """The one body that holds both statements."""
    bodies = list(_bodies(kernel.body)) if callable(first) and callable(second) else [((), kernel.body)]
    found = [(path, body, _positions(body, first), _positions(body, second)) for path, body in bodies]
    found = [item for item in found if item[2] and item[3]]
    if len(found) != 1 or len(found[0][2]) != 1 or len(found[0][3]) != 1 or found[0][2] == found[0][3]:
        matches = ", ".join(f"{len(one)} and {len(other)}" for _, _, one, other in found) or "none"
        raise OrderError(f"{kernel.name}: two statements of one body are to be named, each matched once, not {matches}")
    path, body, one, other = found[0]
    return path, body, one[0], other[0]


def _bodies(body: Body, path: Path = ()) -> Iterator[tuple[Path, Body]]:
    """The body and every body inside it, with its path of positions."""
    yield path, body
    for position, stmt in enumerate(body):
        if hasattr(stmt, "body"):
            yield from _bodies(stmt.body, (*path, position))


def _positions(body: Body, where: Where) -> list[int]:
    if callable(where):
        return [position for position, stmt in enumerate(body) if where(stmt)]
    return [where] if 0 <= where < len(body) else []


def _put(body: Body, path: Path, inner: Body) -> Body:
    """The body with the one at a path replaced."""
    if not path:
        return inner
    head, *rest = path
    within = _put(body[head].body, tuple(rest), inner)  # type: ignore[attr-defined]
    return (*body[:head], replace(body[head], body=within), *body[head + 1 :])  # type: ignore[call-arg]


def _refusal(kernel: Kernel, body: Body, one: int, other: int, tie: tuple[int, int, str, str]) -> str:
    before, after, kind, buffer = tie
    pair = f"{kernel.name}: `{stmt_text(body[one])}` and `{stmt_text(body[other])}` may not change places"
    if kind == "order":
        return f"{pair}: nothing passes between `{stmt_text(body[before])}` and `{stmt_text(body[after])}`"
    return f"{pair}: {buffer} ties them, `{stmt_text(body[after])}` {KINDS[kind]} by `{stmt_text(body[before])}`"
