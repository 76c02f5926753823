"""The kernel that looks for reads outside of an array: both interpreters, and the rule itself in NumPy."""

import numpy as np
import pytest
from attention_cases import Problem
from functions import traced

from flashgen import build, lower
from flashgen.attention.reads import NEVER, outside, places, size
from flashgen.interp import machine, tile
from flashgen.ir.expr import Load, Var, evaluate, load, select
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

X, Y = Var("x"), Var("y")


def counted(problem, item, runs):
    """outside of one array by one interpreter."""
    stages = build.reads(problem.spec, item, parse_arch("sm_80"), 64)
    scalars = problem.scalars | {"one": 1, "length_k": problem.seqlen_k}
    scalars |= {size(item.name, axis): count for axis, count in enumerate(problem.arrays[item.name].shape)}
    count = evaluate(places(problem.spec), scalars | {"block_size": 64}) * 64
    arrays = problem.arrays | {"outside": np.full((1, problem.heads, count), np.nan, np.float32)}
    if runs == "tile":
        tile.run(lower.tile(stages.tile), stages.plan.sizes, arrays, scalars)
    else:
        machine.run(stages.machine, stages.plan, arrays, scalars)
    return arrays["outside"]


@pytest.mark.parametrize(
    ("mask", "score"), [("document", None), ("visible", "bias"), (None, "buckets"), ("lengths", "relative")]
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_interpreters_count_the_same(causal, mask, score):
    problem = Problem(Spec(16, 16, **traced(causal, mask, score)), 2, 2, 1, 70, 130)
    for item in problem.spec.arrays:
        problem.arrays[item.name] = problem.arrays[item.name][..., :-1]
        by_tile, by_machine = (counted(problem, item, runs) for runs in ("tile", "machine"))
        np.testing.assert_array_equal(by_tile, by_machine)
        assert np.isfinite(by_tile).all()


def test_every_element_is_counted_once():
    problem = Problem(Spec(16, 16, **traced(True, "document", None)), 3, 2, 1, 70, 70)
    (item,) = problem.spec.arrays
    problem.arrays[item.name] = np.zeros((3, 60), np.int32)
    found = counted(problem, item, "tile")
    rows = np.arange(70)
    bad = (rows[None, :] <= rows[:, None]) & ((rows[:, None] >= 60) | (rows[None, :] >= 60))
    assert np.all(found.sum(-1) == 3 * bad.sum())


def test_the_rule():
    a, i = load("a", X), load("i", Y)
    sizes = {"a_size_0": 5, "i_size_0": 2}

    def holds(expr, array, **values):
        return bool(evaluate(outside(expr, array), sizes | values))

    assert holds(a, "a", x=5) and holds(a, "a", x=-1) and not holds(a, "a", x=4)
    assert outside(a, "i") == NEVER and outside(X + Y * 2, "a") == NEVER
    assert outside(a + i, "i") == outside(i, "i")
    where = select(X < 5, a, 0)
    assert not holds(where, "a", x=7) and holds(where, "a", x=-2)
    assert not holds((X < 5) & (a > 0), "a", x=7) and holds((X < 9) & (a > 0), "a", x=7)
    assert not holds((X >= 5) | (a > 0), "a", x=7) and holds((X >= 9) | (a > 0), "a", x=7)
    assert holds((a > 0) & (X < 5), "a", x=7)
    assert outside(Load("a", (i,)), "i") == outside(i, "i")
