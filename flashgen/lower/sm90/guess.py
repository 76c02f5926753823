"""Softmax by a guess: the exponentials of a step do not wait for its row maxima.

Any offset near a row's maximum gives the same O and LSE; only overflow has to be kept away. So a step takes the maxima
as they were at the last step that computed them, and looks at the result: where an element of P is 2 or more, which a
bit of its exponent tells, the step is done again with maxima of its own. A bias keeps P far below 2 until then.
Of a step's instructions a quarter computed maxima, which everything else waited for.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import Binary, Const, Expr, I, Load, Unary, exp2, load, maximum, walk
from flashgen.ir.graph import access
from flashgen.ir.nodes import Buffer, For, Kernel, Space, Stmt, Tile
from flashgen.ir.visit import Body, rewrite, statements
from flashgen.lower.sm90.exponents import SCORE, exponent
from flashgen.lower.sm90.roles import in_role
from flashgen.lower.sm90.select import hides
from flashgen.machine.base import FillFragment, MapFragment, PackFragment, ReduceRows
from flashgen.machine.sm90 import FenceReads, IfAnyLarge, LoadMatrix, Rescore, WaitFull, Wgmma
from flashgen.plan.plan import Plan

# In powers of two: a row's scores may grow by one more before a step is done again. bfloat16 has the range of float32,
# of which the products of P and V need some too; in float16 what is 2^-10 of the maximum begins to lose digits.
BIAS = {BF16: 30.0}
NARROW_BIAS = 4.0
STEP_SUM = "step_sum"
LEAST = Const(-3.4028234663852886e38)  # of float32: less than any score, and hidden ones, -inf, are far below it


def guess_maximum(kernel: Kernel, plan: Plan) -> Kernel:
    """Compute P with the maxima of earlier steps; where that was too low, once more with those of this step.

    Invariant: o_acc, row_sum and lse refer to the same offset, and no finite element of P that is used is 2 or more.
    """
    if not plan.has("guessed maximum"):
        return kernel
    bias = BIAS.get(kernel.buffer("p_operand").dtype, NARROW_BIAS)
    factor = _factor(kernel)
    maximum_so_far = load("row_max", I) * factor
    if _hides_rows(kernel):
        maximum_so_far = maximum(maximum_so_far, LEAST)
    buffer = Buffer(STEP_SUM, ("block_q",), F32, Space.REGISTER, warps=kernel.buffer("row_sum").warps)

    def change(body: Body) -> Body:
        return rewrite(
            rewrite(body, lambda stmt: _biased(stmt, bias, factor)),
            lambda stmt: _guessed(stmt, maximum_so_far + Const(bias), factor),
        )

    return in_role(kernel.with_buffer(buffer), "consumer", change)


def _factor(kernel: Kernel) -> Expr:
    """What scores are multiplied by for exponentials of base 2: by the scale too, or a score function has taken it."""
    for stmt in statements(kernel.body):
        match stmt:
            case MapFragment("p", Unary("exp2", Binary("-", Binary("*", Load(), factor)))):
                return factor
    raise ValueError(f"{kernel.name}: p is not exp2(s * factor - offset)")


def _biased(stmt: Stmt, bias: float, factor: Expr) -> Stmt:
    """Offsets that are `bias` above the maximum."""
    if isinstance(stmt, MapFragment) and stmt.dst == "offset":
        return replace(stmt, expr=stmt.expr + Const(bias))
    if isinstance(stmt, MapFragment) and stmt.dst == "rescale":
        return replace(stmt, expr=exp2(load("row_max_old", I) * factor + Const(bias) - load("offset", I)))
    return stmt


def _hides_rows(kernel: Kernel) -> bool:
    """True where what an array says hides a row from many blocks that others of its tile see, as documents do.

    A row that has seen no key yet is then no reason to do the step again: with -inf as its maximum P would be NaN, and
    of 16 documents in 16384 tokens a tenth of all steps would be computed twice.
    """
    arrays = {buffer.name for buffer in kernel.buffers if buffer.by_element}
    masks = (expr for stmt in statements(kernel.body) if hides(stmt) for expr in stmt.expressions())
    return any(isinstance(node, Load) and node.buffer in arrays for mask in masks for node in walk(mask))


def _guessed(loop: Stmt, offset: Expr, factor: Expr) -> Stmt:
    """The loop with each step's statements between its products in their short form, and in full where need be."""
    if not isinstance(loop, For):
        return loop
    products = [at for at, stmt in enumerate(loop.body) if isinstance(stmt, Wgmma)]
    if len(products) != 2:
        return loop
    scores = loop.body[products[0]]
    assert isinstance(scores, Wgmma) and isinstance(scores.a, Tile)
    head, middle = loop.body[: products[1] + 1], loop.body[products[1] + 1 :]
    masked = tuple(stmt for stmt in middle if access(stmt).writes == {scores.acc} or isinstance(stmt, LoadMatrix))
    weights = tuple(stmt for stmt in middle if isinstance(stmt, MapFragment) and stmt.dst == "p")
    waits = tuple(replace(stmt, behind=STEP_SUM) for stmt in middle if isinstance(stmt, WaitFull))
    packed = tuple(stmt for stmt in middle if isinstance(stmt, PackFragment))
    full = tuple(inner for stmt in middle if not isinstance(stmt, WaitFull) for inner in _summed(stmt))
    unseen = "infinity of its first" if LEAST in walk(offset) else "NaN"
    guess = MapFragment(
        "offset",
        offset,
        note=f"by the last maxima computed; a row that has seen no key makes {unseen}, which is found below",
    )
    total = MapFragment("row_sum", load("row_sum", I) + load(STEP_SUM, I))
    again = IfAnyLarge(
        packed[0].dst,
        (Rescore(scores.acc, scores.a, scores.b), FenceReads(), *full),
        note="the guess was too low, or there was none: the step once more",
    )
    summed = tuple(inner for stmt in middle if _is_sum(stmt) for inner in _summed(stmt))
    short = _exponents(masked, guess, weights, factor)
    return replace(loop, body=(*head, *short, *summed, *waits, *packed, again, total))


def _exponents(masked: Body, guess: MapFragment, weights: Body, factor: Expr) -> Body:
    """The scores, the offset and P. A score function gives exponents of base 2, the offset taken off; hidden ones are
    -inf as before."""
    at = next((here for here, stmt in enumerate(masked) if _is_function(stmt)), None)
    if at is None:
        return (*masked, guess, *weights)
    scored = masked[at]
    assert isinstance(scored, MapFragment)
    scored = replace(scored, expr=exponent(scored.expr, factor, load("offset", I)))
    powers = tuple(replace(stmt, expr=exp2(SCORE)) for stmt in weights)  # type: ignore[call-arg]
    return (*masked[:at], guess, scored, *masked[at + 1 :], *powers)


def _is_function(stmt: Stmt) -> bool:
    """True for the map of a score function that needs no columns one by one."""
    return type(stmt) is MapFragment and not hides(stmt)


def _summed(stmt: Stmt) -> Body:
    """The sum of a step by itself."""
    return (FillFragment(STEP_SUM, Const(0.0)), replace(stmt, dst=STEP_SUM)) if _is_sum(stmt) else (stmt,)  # type: ignore[call-arg]


def _is_sum(stmt: Stmt) -> bool:
    return isinstance(stmt, ReduceRows) and stmt.dst == "row_sum"
