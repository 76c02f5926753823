"""Stages: each shared tile that TMA fills is a ring, and every load takes the next place in it."""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.expr import Binary, Const, Expr, Var, binary, maximum
from flashgen.ir.nodes import For, Kernel, Stmt, Tile, name_of
from flashgen.ir.visit import Body
from flashgen.machine.base import Assign, Counter, WhileLoop
from flashgen.machine.sm90 import TmaLoad
from flashgen.plan.plan import Plan

DONE = Var("tiles_done")


def stage_tiles(kernel: Kernel, plan: Plan) -> Kernel:
    """Tiles go round through their stages: the n-th load of a tile by this block uses stage n % stages.

    A loop's tiles are counted by its steps, in all tiles of queries so far; Q by those tiles.
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
        if isinstance(stmt, For):
            step = binary("-", Var(stmt.axis), stmt.start)
            places = dict.fromkeys(_loaded(stmt.body), _steps(stmt) + step if persistent else step)
            places |= dict.fromkeys(once, DONE) if persistent else {}
            result.append(replace(stmt, body=tuple(_at(inner, places, plan) for inner in stmt.body)))
            if persistent:
                steps = maximum(binary("-", stmt.stop, stmt.start), Const(0))
                result.append(Assign(_steps(stmt).name, _steps(stmt) + steps))
        else:
            result.append(_at(stmt, dict.fromkeys(once, DONE) if persistent else {}, plan))
    return tuple(result)


def _loaded(body: Body) -> list[str]:
    return [name_of(stmt.dst) for stmt in body if isinstance(stmt, TmaLoad)]


def _at(stmt: Stmt, places: dict[str, Expr], plan: Plan) -> Stmt:
    """The statement with the stages of its tiles; % is kept where there is one stage, as its quotient counts rounds."""
    tiles = {name: getattr(stmt, name) for name in vars(stmt) if isinstance(getattr(stmt, name), Tile)}
    changes = {
        name: Tile(tile.buffer, Binary("%", places[tile.buffer], Const(plan.stages.get(tile.buffer, 1))))
        for name, tile in tiles.items()
        if tile.buffer in places
    }
    return replace(stmt, **changes) if changes else stmt  # type: ignore[arg-type]


def goes_round(kernel: Kernel, tile: Tile) -> bool:
    """True for a tile that is loaded more than once."""
    return isinstance(tile.stage, Binary) or kernel.buffer(tile.buffer).stages > 1


def parity(tile: Tile) -> Expr:
    """That of the phase of a tile's place: how often the ring has been passed before, odd or even."""
    stage = tile.stage
    return (binary("//", stage.x, stage.y) if isinstance(stage, Binary) else Const(0)) % Const(2)
