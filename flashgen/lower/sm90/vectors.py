"""Vectors of what masks and scores read from arrays: a number for each row or each column, not for each element.

What differs by row alone, as the document of a query, is loaded once for a tile of queries. What differs by column
alone is loaded ahead of the product behind which it is needed, each number by one lane of a warp, whom the others ask.
Read element by element and behind the product, the documents of 128 keys came in four round trips to the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import Expr, I, J, Load, children, load, rebuild, variables, walk
from flashgen.ir.graph import access
from flashgen.ir.nodes import Buffer, For, If, Kernel, Space, Stmt
from flashgen.ir.visit import Body, rewrite, statements
from flashgen.lower.sm90.roles import for_each_tile, in_role, within
from flashgen.machine.base import MapFragment
from flashgen.machine.sm90 import HoldColumns, MapAsking, Wgmma
from flashgen.plan.plan import Plan

FORWARD, SCORES = "attention_forward", "s"
Names = dict[Load, str]


def hold_vectors(kernel: Kernel, plan: Plan) -> Kernel:
    """In the forward, load what functions read by row once for a tile, and what they read by column ahead of a product.

    Invariant: none; the same numbers, loaded by other lanes or at another time.
    """
    if kernel.name != FORWARD:
        return kernel
    vectors = _Vectors(kernel)
    kernel = in_role(kernel, "consumer", lambda body: for_each_tile(body, vectors.of_tile))
    for buffer in vectors.buffers.values():
        kernel = kernel.with_buffer(buffer)
    return kernel


class _Vectors:
    """The vectors of a kernel, by name, as they are found."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.arrays = {buffer.name for buffer in kernel.buffers if buffer.by_element}
        self.buffers: dict[str, Buffer] = {}

    def of_tile(self, body: Body) -> Body:
        """What the computing warps do for a tile of queries: rows are read ahead of its first step."""
        changing = {stmt.axis for stmt in body if isinstance(stmt, For)}
        for inner in statements(tuple(inner for stmt in body for inner in getattr(stmt, "body", ()))):
            changing |= {*inner.assigns(), *((inner.axis,) if isinstance(inner, For) else ())}
        names = self._named(body, I, lambda found: not variables(found) & changing)
        users = [at for at, stmt in enumerate(body) if self._named((stmt,), I, names.__contains__)]
        first = min(users, default=len(body))
        reads = tuple(MapFragment(name, found) for found, name in names.items())
        steps = within(rewrite(body, lambda stmt: _reading(stmt, names, MapFragment)), self._of_step)
        return (*steps[:first], *reads, *steps[first:])

    def _of_step(self, body: Body) -> Body:
        """A step: columns are read as soon as it is known which they are, and that they are needed."""
        if not any(isinstance(stmt, Wgmma) and stmt.acc == SCORES for stmt in body):
            return body
        names = self._named(body, J, lambda found: True)
        if not names:
            return body
        holds: Body = tuple(HoldColumns(name, found) for found, name in names.items())
        conditions = set(_conditions(body, names))
        if len(conditions) == 1 and (condition := conditions.pop()) is not None:
            holds = (If(condition, holds),)
        needed = {name for stmt in holds for name in access(stmt).reads}
        place = max((at for at, stmt in enumerate(body) if needed & set(stmt.assigns())), default=-1) + 1
        body = rewrite(body, lambda stmt: _reading(stmt, names, MapAsking))
        return (*body[:place], *holds, *body[place:])

    def _named(self, body: Body, by: Expr, belongs: Callable[[Load], bool]) -> Names:
        """What maps of the scores load by row or by column alone, and the vectors that take it.

        The first step of a tile, which stands apart, reads other places to the same vectors: they are named by order.
        """
        names: Names = {}
        for stmt in statements(body):
            for found in self._loads(stmt.expr) if _maps_scores(stmt) else ():  # type: ignore[attr-defined]
                if {I, J} & set(walk(found)) == {by} and found not in names and belongs(found):
                    number = sum(other.buffer == found.buffer for other in names)
                    names[found] = self._vector(found.buffer, by, number)
        return names

    def _loads(self, expr: Expr) -> list[Load]:
        """The outermost loads from arrays of functions."""
        if isinstance(expr, Load) and expr.buffer in self.arrays:
            return [expr]
        return [found for part in children(expr) for found in self._loads(part)]

    def _vector(self, array: str, by: Expr, number: int) -> str:
        """The name of the vector for the so-manieth load from an array; 16-bit elements become float32."""
        name = f"{array}_{'rows' if by == I else 'columns'}" + (f"_{number}" if number else "")
        scores = self.kernel.buffer(SCORES)
        dtype = I32 if self.kernel.buffer(array).dtype == I32 else F32
        shape = scores.shape[:1] if by == I else scores.shape[1:]
        self.buffers[name] = Buffer(name, shape, dtype, Space.REGISTER, warps=scores.warps, by_column=by == J)
        return name


def _maps_scores(stmt: Stmt) -> bool:
    return type(stmt) is MapFragment and stmt.dst == SCORES


def _conditions(body: Body, names: Names) -> Iterator[Expr | None]:
    """Under what maps that read the vectors stand, in this body or further in: None for what is no If."""
    for stmt in body:
        if _maps_scores(stmt) and names.keys() & {node for part in stmt.expressions() for node in walk(part)}:
            yield None
        inner = _conditions(getattr(stmt, "body", ()), names)
        yield from (stmt.condition if found is None and isinstance(stmt, If) else found for found in inner)


def _reading(stmt: Stmt, names: Names, kind: type[MapFragment] | type[MapAsking]) -> Stmt:
    """The statement as one that reads the vectors."""
    if not _maps_scores(stmt):
        return stmt
    assert isinstance(stmt, MapFragment)
    index = J if kind is MapAsking else I

    def change(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr in names:
            return load(names[expr], index)
        return rebuild(expr, change)

    expr = change(stmt.expr)
    return stmt if expr == stmt.expr else kind(stmt.dst, expr, note=stmt.note)
