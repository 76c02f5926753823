"""Barriers for what threads exchange through shared memory, where the copy pipeline has not placed one already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.ir.nodes import Kernel, Stmt
from flashgen.ir.visit import Body
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import WaitGroup
from flashgen.machine.sm80_hazards import Hazard, hazards, safe
from flashgen.plan.plan import Plan


def insert(kernel: Kernel, plan: Plan) -> Kernel:
    """Put a barrier before each statement that would read or overwrite what other warps still write or read.

    Invariant: the walk of machine/sm80_hazards finds nothing.
    """
    found = hazards(kernel, plan)
    while found:
        first = min(found, key=lambda hazard: hazard.path)
        protection = _protection(first)
        kernel = kernel.having(body=_before(kernel.body, first.path, protection))
        moved = (*first.path[:-1], first.path[-1] + len(protection))
        found = hazards(kernel, plan)
        if any((hazard.path, hazard.reason) == (moved, first.reason) for hazard in found):
            raise AssertionError(f"{kernel.name}: a barrier does not help: {first}")
    return kernel


def drop_redundant(kernel: Kernel, plan: Plan) -> Kernel:
    """Leave out each barrier and wait that the others make needless.

    Invariant: the walk of machine/sm80_hazards finds nothing, and would without any one of those that are left.
    """
    for path in reversed(list(_meetings(kernel.body))):
        without = kernel.having(body=_before(kernel.body, path, (), leave_out=1))
        if safe(without, plan):
            kernel = without
    return kernel


def _meetings(body: Body, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Paths of the barriers and waits, in program order."""
    for position, stmt in enumerate(body):
        if isinstance(stmt, Barrier | WaitGroup):
            yield (*path, position)
        yield from _meetings(getattr(stmt, "body", ()), (*path, position))


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
