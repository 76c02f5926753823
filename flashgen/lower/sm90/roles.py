"""Roles: one warp loads, the others compute, all the same or each warpgroup a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashgen.ir.expr import variables
from flashgen.ir.graph import access
from flashgen.ir.nodes import For, If, Kernel, Let, Space, Stmt, name_of
from flashgen.ir.printer import stmt_text
from flashgen.ir.visit import Body, statements
from flashgen.machine.base import Counter, StoreFragment, WhileLoop
from flashgen.machine.sm90 import WARPGROUP_WARPS, InitBarriers, LoadVector, Role, TmaLoad, TmaStore
from flashgen.plan.plan import Plan


def split_roles(kernel: Kernel, plan: Plan) -> Kernel:
    """One thread loads, the computing warps do everything else; both go through the same tiles.

    Invariant: a load depends on no statement of the other role (the dataflow graph has no edge into it but from
    integers, which each role counts for itself).
    """
    shared = tuple(stmt for stmt in kernel.body if isinstance(stmt, Let))
    rest = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Let))
    producer = needed(_only(rest, _is_load))
    consumer = needed(_only(rest, lambda stmt: not _is_load(stmt)))
    written = {name_of(place) for stmt in statements(consumer) for place in stmt.writes()}
    read = {name_of(place) for stmt in statements(producer) for place in stmt.reads()}
    if written & read:
        raise ValueError(f"{kernel.name}: loads depend on {sorted(written & read)}, which the computing warps write")
    loads = Role("producer", plan.role_registers[0], producer, note="one thread keeps the stages full")
    return kernel.having(body=(InitBarriers(), *shared, loads, *_consumers(kernel, plan, consumer)))


def _is_load(stmt: Stmt) -> bool:
    return isinstance(stmt, TmaLoad | LoadVector)


def _consumers(kernel: Kernel, plan: Plan, body: Body) -> tuple[Role, ...]:
    """All computing warps do the same, or each warpgroup what touches the register tiles that it holds."""
    registers = plan.role_registers[1]
    holders = sorted({item.first_warp for item in kernel.buffers if item.space is Space.REGISTER})
    if len(holders) == 1:
        return (Role("consumer", registers, body),)

    def role(first: int) -> Role:
        part = needed(_only(body, lambda stmt: _holder(kernel, stmt) == first))
        note = f"this warpgroup computes {_results(part)}"
        return Role("consumer", registers, part, first // WARPGROUP_WARPS, note=note)

    return tuple(role(first) for first in holders)


def _holder(kernel: Kernel, stmt: Stmt) -> int:
    """The first of the warps that execute a statement: those that hold its register tiles, or have stored its tile."""
    if isinstance(stmt, TmaStore):
        stmt = next(
            other for other in statements(kernel.body) if isinstance(other, StoreFragment) and other.dst == stmt.src
        )
    touched = access(stmt).reads | access(stmt).writes
    found = {item.first_warp for item in kernel.buffers if item.space is Space.REGISTER and item.name in touched}
    if len(found) != 1:
        raise ValueError(f"{kernel.name}: `{stmt_text(stmt)}` touches register tiles of {len(found)} warpgroups")
    return found.pop()


def _results(body: Body) -> str:
    """What leaves from a role."""
    return " and ".join(stmt.dst.buffer for stmt in body if isinstance(stmt, TmaStore))


def _only(body: Body, belongs: Callable[[Stmt], bool]) -> Body:
    """The statements of one role, with the loops around them and the integers that they need."""
    result: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, For | WhileLoop):
            inner = needed(_only(stmt.body, belongs))
            if not all(part.assigns() for part in inner):
                result.append(replace(stmt, body=inner))
        elif stmt.assigns() or belongs(stmt):
            result.append(stmt)
    return tuple(result)


def needed(body: Body) -> Body:
    """The body without Lets and Counters that nothing in it uses."""
    used: set[str] = set()
    result: list[Stmt] = []
    for stmt in reversed(body):
        if isinstance(stmt, Let | Counter) and stmt.name not in used:
            continue
        for inner in statements((stmt,)):
            for expr in inner.expressions():
                used |= variables(expr)
            if not isinstance(inner, Let | Counter):
                used |= set(inner.assigns())
        result.append(stmt)
    return tuple(reversed(result))


def in_role(kernel: Kernel, role: str, change: Callable[[Body], Body]) -> Kernel:
    """The kernel with the body of one role changed."""
    body = tuple(
        replace(stmt, body=change(stmt.body)) if isinstance(stmt, Role) and stmt.role == role else stmt
        for stmt in kernel.body
    )
    return kernel.having(body=body)


def for_each_tile(body: Body, change: Callable[[Body], Body]) -> Body:
    """The body of a role with `change` applied to what it does for one tile of queries."""
    persistent = any(isinstance(stmt, WhileLoop) for stmt in body)
    return within(body, change, (WhileLoop,)) if persistent else change(body)


def behind_lets(body: Body, added: Body) -> Body:
    """The body with statements added behind the integers at its beginning."""
    lets = next((at for at, stmt in enumerate(body) if not isinstance(stmt, Let)), len(body))
    return (*body[:lets], *added, *body[lets:])


def within(body: Body, change: Callable[[Body], Body], into: tuple[type, ...] = (For, If, WhileLoop)) -> Body:
    """The body with `change` applied to the bodies of the loops and conditions that stand in it."""
    return tuple(
        replace(stmt, body=change(stmt.body)) if isinstance(stmt, into) else stmt  # type: ignore[attr-defined, call-arg]
        for stmt in body
    )
