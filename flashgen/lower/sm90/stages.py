"""Stages: each shared tile that a loop fills is a ring, and every load takes the next place in it."""

from __future__ import annotations

from dataclasses import fields, replace

from flashgen.ir.expr import Binary, Const, Expr, Load, Var, binary, maximum, rebuild
from flashgen.ir.nodes import For, Kernel, Stmt, Tile, name_of
from flashgen.ir.visit import Body, rewrite
from flashgen.machine.base import Assign, Counter, StoreFragment, WhileLoop
from flashgen.machine.sm90 import HandOver, LoadVector, TmaLoad
from flashgen.plan.plan import Plan

DONE = Var("tiles_done")


def stage_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """Tiles go round through their stages: the n-th load of a tile by this block uses stage n % stages.

    A loop's tiles are counted by its steps, in all tiles of queries so far; Q by those tiles. So do tiles that the
    computing warps fill in a loop.
    Invariant: every access to such a tile names its place by the load that filled it.
    """
    result: list[Stmt] = []
    for stmt in kernel.body:
        if isinstance(stmt, WhileLoop):
            loops = [inner for inner in stmt.body if isinstance(inner, For)]
            result += [Counter(_steps(loop).name, Const(0)) for loop in loops]
            result.append(replace(stmt, body=_staged(stmt.body, plan, persistent=True)))
        else:
            result += _staged((stmt,), plan, persistent=False)
    return kernel.having(body=tuple(result))


def _steps(loop: For) -> Var:
    """The counter of a loop's steps in earlier tiles."""
    return Var(f"{loop.axis}s_done")


def _staged(body: Body, plan: Plan, persistent: bool) -> Body:
    result: list[Stmt] = []
    once = _loaded(body)
    for stmt in body:
        if isinstance(stmt, For) and isinstance(stmt.body[-1], For):
            result.append(replace(stmt, body=_staged(stmt.body, plan, persistent)))
        elif isinstance(stmt, For):
            numbered = any("step" in inner.assigns() for inner in stmt.body)
            step = Var("step") if numbered else binary("-", Var(stmt.axis), stmt.start)
            places = dict.fromkeys(_filled(stmt.body), _steps(stmt) + step if persistent else step)
            places |= dict.fromkeys(once, DONE) if persistent else {}
            result.append(replace(stmt, body=_at(stmt.body, places, plan)))
            if persistent:
                steps = maximum(binary("-", stmt.stop, stmt.start), Const(0))
                result.append(Assign(_steps(stmt).name, _steps(stmt) + steps))
        else:
            result += _at((stmt,), dict.fromkeys(once, DONE) if persistent else {}, plan)
    return tuple(result)


def _loaded(body: Body) -> list[str]:
    return [name_of(stmt.dst) for stmt in body if isinstance(stmt, TmaLoad | LoadVector)]


def _filled(body: Body) -> list[str]:
    return _loaded(body) + [name_of(stmt.dst) for stmt in body if isinstance(stmt, StoreFragment | HandOver)]


def _at(body: Body, places: dict[str, Expr], plan: Plan) -> Body:
    """The statements with the stages of what they touch; % is kept where there is one stage, as its quotient counts
    rounds."""

    def stage(buffer: str) -> Expr:
        return Binary("%", places[buffer], Const(plan.stages.get(buffer, 1)))

    def loads(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.buffer in places and plan.stages.get(expr.buffer, 1) > 1:
            return Load(expr.buffer, (stage(expr.buffer), *expr.index))
        return rebuild(expr, loads)

    def change(stmt: Stmt) -> Stmt:
        changes: dict[str, object] = {}
        for name in (item.name for item in fields(stmt)):
            value = getattr(stmt, name)
            if isinstance(value, Tile) and value.buffer in places:
                changes[name] = Tile(value.buffer, stage(value.buffer))
            elif isinstance(value, Expr):
                changes[name] = loads(value)
        return replace(stmt, **changes) if changes else stmt  # type: ignore[arg-type]

    return rewrite(body, change)


def goes_round(kernel: Kernel, tile: Tile) -> bool:
    """True for a tile that is loaded more than once."""
    return isinstance(tile.stage, Binary) or kernel.buffer(tile.buffer).stages > 1


def parity(tile: Tile) -> Expr:
    """That of the phase of a tile's place: how often the ring has been passed before, odd or even."""
    stage = tile.stage
    return (binary("//", stage.x, stage.y) if isinstance(stage, Binary) else Const(0)) % Const(2)
