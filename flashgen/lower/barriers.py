"""Barriers for what threads exchange through shared memory, where the copy pipeline has not placed one already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.ir.nodes import Kernel, Stmt
from flashgen.ir.visit import Body
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import WaitGroup
from flashgen.machine.sm80_hazards import Hazard, hazards
from flashgen.plan.plan import Plan


def insert(kernel: Kernel, plan: Plan) -> Kernel:
    """Put a barrier before each statement that would read or overwrite what other warps still write or read.

    Invariant: the walk of machine/sm80_hazards finds nothing.
    """
    found = hazards(kernel, plan)
    while found:
        kernel = kernel.having(body=_before(kernel.body, found[0].path, _protection(found[0])))
        remaining = hazards(kernel, plan)
        if remaining and remaining[0].text == found[0].text and remaining[0].reason == found[0].reason:
            raise AssertionError(f"a barrier does not help: {remaining[0]}")
        found = remaining
    return kernel


def drop_redundant(kernel: Kernel, plan: Plan) -> Kernel:
    """Leave out each barrier that the others make needless.

    Invariant: the walk of machine/sm80_hazards finds nothing, and would without any one of the barriers left.
    """
    for path in reversed(list(_barriers(kernel.body))):
        without = kernel.having(body=_before(kernel.body, path, (), leave_out=1))
        if not hazards(without, plan):
            kernel = without
    return kernel


def _barriers(body: Body, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Paths of the barriers, in program order."""
    for position, stmt in enumerate(body):
        if isinstance(stmt, Barrier):
            yield (*path, position)
        yield from _barriers(getattr(stmt, "body", ()), (*path, position))


def _protection(hazard: Hazard) -> tuple[Stmt, ...]:
    if hazard.in_flight:
        return WaitGroup(0), Barrier(note="nothing is in flight any more")
    return (Barrier(),)


def _before(body: Body, path: tuple[int, ...], stmts: tuple[Stmt, ...], leave_out: int = 0) -> Body:
    """The body with statements put before the one at a path, or in its place."""
    head, *rest = path
    if not rest:
        return (*body[:head], *stmts, *body[head + leave_out :])
    inner = _before(body[head].body, tuple(rest), stmts, leave_out)  # type: ignore[attr-defined]
    return (*body[:head], replace(body[head], body=inner), *body[head + 1 :])  # type: ignore[call-arg]
