"""The copy pipeline of the sm80 family: loads run ahead of the products that read them.

A loop's copies form groups (a tile and the vectors beside it). With one stage, a group's next copy is issued as soon as
every warp has left its last reader; with more, a slot is refilled while the others are read. At a meeting point the
threads wait for a group and pass a barrier: what they waited for is then visible to all, and what they had all
finished reading may be overwritten, so the issues stand right behind the barrier.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from flashgen.ir.expr import Const, Expr, Load, Var, rebuild
from flashgen.ir.graph import readers
from flashgen.ir.nodes import For, If, Kernel, Let, Stmt, Tile, name_of
from flashgen.ir.visit import Body, lets_at, substitute_stmt
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import CommitGroup, CopyTileAsync, CopyTileElements, CopyVectorAsync, WaitGroup
from flashgen.plan.plan import Plan

COPIES = (CopyTileAsync, CopyTileElements, CopyVectorAsync)


@dataclass
class Group:
    """Copies that are issued and waited for together; positions count the loop's other statements."""

    copies: list[Stmt]
    stages: int
    first_reader: int
    last_reader: int
    meeting: int = 0
    issued_at: int = 0
    distance: int = 0
    names: list[str] = field(default_factory=list)


def stage_copies(kernel: Kernel, plan: Plan) -> Kernel:
    """Issue copies ahead of their readers, in groups, with the waits and barriers that make them visible.

    Invariant: at every read of a copied tile its group has been waited for and a barrier has passed since.
    """
    body: list[Stmt] = []
    loops = [stmt for stmt in kernel.body if isinstance(stmt, For)]
    for stmt in kernel.body:
        if isinstance(stmt, For):
            body += _pipeline(stmt, plan)
        else:
            body.append(stmt)
    result = _commit_straight(tuple(body))
    return kernel.having(body=result if loops else _wait_straight(result))


def _commit_straight(body: Body) -> Body:
    """A commit behind each run of copies outside of the loops."""
    result: list[Stmt] = []
    for position, stmt in enumerate(body):
        result.append(stmt)
        following = body[position + 1] if position + 1 < len(body) else None
        if isinstance(stmt, COPIES) and not isinstance(following, (*COPIES, CommitGroup)):
            result.append(CommitGroup())
    return tuple(result)


def _wait_straight(body: Body) -> Body:
    """Before the first reader of what was copied, wait for all of it."""
    copied = {name_of(stmt.dst) for stmt in body if isinstance(stmt, COPIES)}
    for position, stmt in enumerate(body):
        if copied & {name_of(place) for place in stmt.reads()}:
            return (*body[:position], WaitGroup(0), Barrier(note="the copies have landed"), *body[position:])
    return body


def _pipeline(loop: For, plan: Plan) -> list[Stmt]:
    """The prologue's copies and the loop in its pipelined form."""
    lets = [stmt for stmt in loop.body if isinstance(stmt, Let)]
    compute = [stmt for stmt in loop.body if not isinstance(stmt, (Let, *COPIES))]
    groups = _groups(loop, plan)
    if not groups:
        return [loop]
    end_meeting = _schedule(groups, len(compute))
    step = Var(loop.axis)

    def issue(group: Group, at: Expr, guarded: bool) -> list[Stmt]:
        needed, moved = _at_step(loop, group, at)
        copies = (If(at < loop.stop, (*needed, *moved)),) if guarded else moved
        return [*copies, CommitGroup()]

    prologue: list[Stmt] = []
    for ahead in range(max(group.distance for group in groups)):
        for group in groups:
            if ahead < group.distance:
                prologue += issue(group, loop.start + ahead, guarded=True)
    body: list[Stmt] = list(lets)
    pending = _pending(groups)
    for position in range(len(compute) + 1):
        meets = [group for group in groups if group.meeting == position]
        if meets:
            body += [WaitGroup(pending[position]), Barrier(note=_reason(groups, position))]
        elif position == len(compute) and end_meeting:
            body += [Barrier(note="every warp is done with the tiles of this step")]
        for group in groups:
            if group.issued_at == position:
                body += issue(group, step + group.distance, guarded=group.distance > 0)
        if position < len(compute):
            body.append(_staged(compute[position], step, {name: g.stages for g in groups for name in g.names}))
    return [*prologue, replace(loop, body=tuple(body))]


def _groups(loop: For, plan: Plan) -> list[Group]:
    """Tiles with the vectors that follow them, and where in the loop they are read."""
    groups: list[Group] = []
    for copy in loop.body:
        if not isinstance(copy, COPIES):
            continue
        name = name_of(copy.dst)
        found = _readers(loop, name)
        stages = plan.stages.get(name, 1)
        if isinstance(copy, CopyVectorAsync) and groups:
            group = groups[-1]
            group.copies.append(copy)
            group.names.append(name)
            group.first_reader = min(group.first_reader, found[0])
            group.last_reader = max(group.last_reader, found[-1])
        else:
            groups.append(Group([copy], stages, found[0], found[-1], names=[name]))
    return groups


def _readers(loop: For, name: str) -> list[int]:
    """Positions among the loop's other statements that read a buffer, by the dataflow graph of the loop's body."""
    places = [at for at, stmt in enumerate(loop.body) if not isinstance(stmt, (Let, *COPIES))]
    found = [places.index(at) for at in readers(loop.body, name) if at in places]
    if not found:
        raise ValueError(f"{name} is copied in a loop that does not read it; drop the copy")
    return found


def _schedule(groups: list[Group], end: int) -> bool:
    """Choose each group's meeting point, where it is issued and how many steps ahead; True if the loop's end meets."""
    for group in groups:
        earlier = [other.last_reader + 1 for other in groups if other.last_reader < group.first_reader]
        single = [at for at in earlier if at <= group.first_reader]
        group.meeting = 0 if group.stages > 1 else max(single, default=group.first_reader)
    first = min(group.meeting for group in groups)
    end_meeting = False
    for group in groups:
        later = sorted(other.meeting for other in groups if other.meeting > group.last_reader)
        if group.stages > 1:
            group.issued_at, group.distance = first, group.stages - 1
        elif later:
            group.issued_at, group.distance = later[0], 1
        elif group.meeting > first:
            group.issued_at, group.distance = first, 0
        else:
            group.issued_at, group.distance, end_meeting = end, 1, True
    return end_meeting


def _pending(groups: list[Group]) -> dict[int, int]:
    """For each meeting point, how many newer groups may still be in flight there: counted on a simulated run."""
    commits: list[tuple[int, int]] = []
    for ahead in range(max(group.distance for group in groups)):
        commits += [(index, ahead) for index, group in enumerate(groups) if ahead < group.distance]
    positions = sorted({group.meeting for group in groups} | {group.issued_at for group in groups})
    result: dict[int, int] = {}
    for step in range(2 + max(group.stages for group in groups)):
        for position in positions:
            needed = [commits.index((i, step)) for i, group in enumerate(groups) if group.meeting == position]
            if needed:
                allowed = len(commits) - 1 - max(needed)
                result[position] = min(result.get(position, allowed), allowed)
            commits += [(i, step + group.distance) for i, group in enumerate(groups) if group.issued_at == position]
    return result


def _reason(groups: list[Group], position: int) -> str:
    """What a meeting point is for, in the words of the buffers."""
    landed = [name for group in groups if group.meeting == position for name in group.names[:1]]
    freed = [name for group in groups if group.issued_at == position for name in group.names[:1]]
    return f"{' and '.join(landed)} landed" + (f"; the slot of {' and '.join(freed)} is free" if freed else "")


def _stage(step: Expr, stages: int) -> Expr:
    return Const(0) if stages == 1 else step % stages


def _at_step(loop: For, group: Group, at: Expr) -> tuple[Body, Body]:
    """The copies of another step, with the loop's Lets written out as they belong to this one, and what these load."""
    needed, values = lets_at(loop, at, "next") if at != Var(loop.axis) else ((), {})
    copies = (substitute_stmt(copy, values) for copy in group.copies)
    stage = _stage(at, group.stages)
    return needed, tuple(replace(copy, dst=Tile(name_of(copy.dst), stage)) for copy in copies)  # type: ignore[attr-defined, call-arg]


def _staged(stmt: Stmt, step: Expr, stages: dict[str, int]) -> Stmt:
    """The statement reading the stage of this step."""
    if hasattr(stmt, "body"):
        return replace(stmt, body=tuple(_staged(inner, step, stages) for inner in stmt.body))  # type: ignore[call-arg]

    def loads(expr: Expr) -> Expr:
        if isinstance(expr, Load) and stages.get(expr.buffer, 1) > 1:
            return Load(expr.buffer, (_stage(step, stages[expr.buffer]), *expr.index))
        return rebuild(expr, loads)

    changes: dict[str, object] = {}
    for name in (item.name for item in fields(stmt)):
        value = getattr(stmt, name)
        if isinstance(value, Tile) and value.buffer in stages:
            changes[name] = Tile(value.buffer, _stage(step, stages[value.buffer]))
        elif isinstance(value, Expr):
            changes[name] = loads(value)
    return replace(stmt, **changes)  # type: ignore[arg-type]
