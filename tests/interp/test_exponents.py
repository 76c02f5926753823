"""Exponents as one sum: the same number as before, with few operations for an element."""

import numpy as np
import pytest
from test_sm90 import ALL, lowered

from flashgen import masks, scores, trace
from flashgen.interp.common import evaluate
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import Binary, Cast, Compare, Const, I, J, Select, Unary, Var, load, text, walk
from flashgen.ir.visit import statements
from flashgen.lower.sm90.exponents import SCORE, exponent
from flashgen.machine.base import MapFragment
from flashgen.plan.plan import LAST_FIRST
from flashgen.spec import Spec

SCALE, SLOPE, PLACE = Var("scale"), Var("slope"), Var("place")
ROW, COLUMN = Cast(F32, PLACE + I), Cast(F32, J)
OFFSET, BIAS = load("offset", I), load("bias", I, J)
LOG2E = Const(1.4426950408889634)
SUMS = {
    "score": SCORE * SCALE,
    "alibi": SCORE * SCALE - SLOPE * (ROW - COLUMN),
    "of both sides": SCORE * SCALE - SLOPE * Unary("abs", ROW - COLUMN),
    "bias": SCORE * SCALE + BIAS,
    "less a bias": SCORE * SCALE - Const(0.5) * BIAS * SLOPE,
    "softcap": Unary("tanh", SCORE * (SCALE * 0.02)) * Const(50.0),
    "of all": SCORE * SCALE + Const(2.0) - SLOPE * (COLUMN - ROW) + SLOPE - SCORE * SCORE,
    "choice": Select(Compare("<", J, PLACE), SCORE * SCALE, Const(-1.0)),
}


class Tile:
    """Four rows and columns."""

    def __init__(self):
        draw = np.random.default_rng(0).normal
        self.arrays = {"s": draw(size=(4, 4)), "bias": draw(size=(4, 4)), "offset": 9 * draw(size=(4, 1))}
        self.names = {"i": np.arange(4)[:, None], "j": np.arange(4), "place": 60, "scale": 0.3, "slope": 0.7}

    def variable(self, name):
        value = self.names[name]
        return np.float32(value) if isinstance(value, float) else value

    def load(self, expr):
        return self.arrays[expr.buffer].astype(np.float32)


@pytest.mark.parametrize("name", SUMS)
def test_the_same_number(name):
    found = evaluate(exponent(SUMS[name], LOG2E, OFFSET), Tile())
    np.testing.assert_allclose(found, evaluate(SUMS[name] * LOG2E - OFFSET, Tile()), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("score", "s[i, j] * (1.4426950408889634 * scale) - offset[i]"),
        (
            "alibi",
            "s[i, j] * (1.4426950408889634 * scale) + (float32(j) * (1.4426950408889634 * slope) + "
            "(neg(offset[i]) - float32(place + i) * (1.4426950408889634 * slope)))",
        ),
        ("bias", "s[i, j] * (1.4426950408889634 * scale) + (bias[i, j] * 1.4426950408889634 - offset[i])"),
        ("softcap", "tanh(s[i, j] * (scale * 0.02)) * (1.4426950408889634 * 50.0) - offset[i]"),
    ],
)
def test_a_multiplication_and_an_addition_are_one_instruction(name, said):
    assert text(exponent(SUMS[name], LOG2E, OFFSET)) == said


def weights_of(spec, *traits):
    """How a kernel computes P, in the order in which it does."""
    kernel, _ = lowered(spec, warpgroups=2, traits=(*ALL, *traits))
    return [text(stmt.expr) for stmt in statements(kernel.body) if isinstance(stmt, MapFragment) and stmt.dst == "p"]


@pytest.mark.parametrize("score", [scores.alibi, scores.softcap(3.0)], ids=["alibi", "softcap"])
def test_a_step_that_guesses_has_its_exponents_where_the_scores_are(score):
    """The first step, and one that is done again, compute maxima of the scores themselves."""
    spec = Spec(16, 16, BF16, True, score=trace.score(score), mask=trace.mask(masks.window(90, 0)))
    apart = "exp2(s[i, j] * 1.4426950408889634 - offset[i])"
    assert weights_of(spec, LAST_FIRST) == [apart, "exp2(s[i, j])", apart]


def test_without_a_score_function_nothing_changes():
    assert set(weights_of(Spec(16, 16, BF16, True))) == {"exp2(s[i, j] * scale_log2 - offset[i])"}


def test_no_part_is_lost():
    for name, expr in SUMS.items():
        found = exponent(expr, LOG2E, OFFSET)
        for leaf in {node for node in walk(expr) if isinstance(node, Var) or node == BIAS}:
            assert leaf in walk(found), name
        assert not isinstance(found, Binary) or OFFSET in walk(found)
