"""Gradients of arrays that score functions read: every nest on both interpreters, against dense float64 attention."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Problem
from functions import traced
from lowered_cases import OUTPUTS, ROOMY, machine_equals_tile
from test_functions import tiled
from varlen_cases import Sequences

from flashgen import lower, trace
from flashgen.attention.backward_aux import backward_aux
from flashgen.interp import reference, tile
from flashgen.ir.dtype import BF16, F16, F32, I32
from flashgen.plan import planner
from flashgen.plan.candidates import looped_tiles, tile_names
from flashgen.plan.plan import Candidate
from flashgen.runtime import aux_gradients
from flashgen.runtime.arguments import Problem as Sizes
from flashgen.runtime.arrays import LIBRARIES
from flashgen.spec import Spec

# Shapes of a bias, as parts of (batch, heads, seqlen_q, seqlen_k), and the nests that they take.
BIASES = {(1, 1, 1, 1): "rows", (1, 1, 0, 0): "pairs", (1, 0, 0, 0): "pairs", (0, 1, 0, 0): "pairs"}
BIASES |= {(0, 0, 0, 0): "rows", (1, 1, 1, 0): "columns", (0, 1, 1, 0): "columns", (0, 0, 0, 1): "rows"}
BIASES |= {(1, 1, 0, 1): "rows"}


def positions(score, b, h, q_idx, kv_idx, table, ids):
    """A table by what is loaded for the query, and for the key: neither is known to be within it."""
    return score + table[ids[b, q_idx], h] * 0.5 + table[ids[b, kv_idx], h] * score


def sizes_of(problem):
    spec = problem.spec
    return Sizes(
        problem.batches,
        problem.heads,
        problem.heads_kv,
        problem.seqlen_q,
        problem.seqlen_k,
        spec.head_dim,
        spec.head_dim_v,
        (),
    )


def planned(kernel, problem, warps=1, stages=2):
    """A plan on the toy chip, with tiles of 8 by 16 for each warp, or square ones."""
    rows, cols = kernel.buffer("s").shape
    blocks = {rows: 16 * warps if rows == cols else 8 * warps, cols: 16 * warps if rows == cols else 16}
    staged = tuple((name, stages) for name in looped_tiles(kernel))
    layouts = tuple((name, (warps, 1)) for name in tile_names(kernel))
    return planner.make(kernel, problem.spec, ROOMY, Candidate(tuple(blocks.items()), warps, staged, layouts))


def gradient(problem, name, run):
    """The gradient of an array as the runtime makes it; run(kernel, plan, arrays with the target)."""
    arrays = {**problem.arrays, **tiled(problem, 8, 16)}
    walks = []

    def run_part(part, own):
        kernel = backward_aux(problem.spec, part)
        walks.append(part.walk if not part.magnitude else "magnitudes")
        run(kernel, planned(kernel, problem), arrays | own, part.target, own[part.target])

    like = problem.aux[name]
    return aux_gradients.gradient(LIBRARIES["numpy"], problem.spec, name, like, sizes_of(problem), run_part), walks


def on_tile(problem):
    def run(kernel, plan, arrays, name, target):
        used = {item.name for item in kernel.buffers}
        given = {key: value for key, value in (arrays | {name: target}).items() if key in used}
        tile.run(lower.tile(kernel), plan.sizes, given, problem.scalars)

    return run


def on_both(problem):
    """The machine interpreter must agree with the tile interpreter on what it adds to the target, and stay inside."""

    def run(kernel, plan, arrays, name, target):
        before = arrays | {name: target.copy()}
        on_tile(problem)(kernel, plan, arrays, name, target)
        OUTPUTS[kernel.name] = (name,)
        machine_equals_tile(lower.run(kernel, plan), plan, problem, before, {name: target})

    return run


def dense(problem, name):
    q, k, v, dout = (problem.arrays[key].transpose(0, 2, 1, 3) for key in ("q", "k", "v", "dout"))
    return reference.backward_aux(q, k, v, dout, problem.arrays["dlse"], array=name, **problem.options())


def assert_close(found, expected, dtype):
    unit = 2.0**-8 if dtype == BF16 else 2.0**-11
    assert found.shape == expected.shape
    worst = np.abs(found - expected).max(initial=0.0)
    assert worst <= 4 * unit * (1 + np.abs(expected).max(initial=0.0)), worst


def with_bias(spec, ones, **sizes):
    problem = Problem(spec, 2, 4, 2, 21, 30, **sizes)
    whole = (problem.batches, problem.heads, problem.seqlen_q, problem.seqlen_k)
    shape = tuple(1 if one else size for one, size in zip(ones, whole, strict=True))
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    problem.aux["score_biases"] = problem.arrays["score_biases"] = bias
    return problem


@pytest.mark.parametrize("mask", [None, "left", "nothing"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ones", BIASES, ids=str)
def test_a_bias_of_any_shape(ones, causal, mask):
    problem = with_bias(Spec(16, 8, F16, **traced(causal, mask, "bias")), ones)
    found, walks = gradient(problem, "score_biases", on_tile(problem))
    assert walks == [BIASES[ones]]
    assert_close(found, dense(problem, "score_biases"), F16)
    assert mask != "nothing" or not found.any()


@pytest.mark.parametrize("ones", BIASES, ids=str)
def test_the_machine_makes_the_same_of_a_bias(ones):
    problem = with_bias(Spec(16, 16, **traced(True, None, "bias")), ones)
    found, _ = gradient(problem, "score_biases", on_both(problem))
    assert_close(found, dense(problem, "score_biases"), BF16)


OTHERS = [
    ("slopes", "score_of_heads", ["rows"]),
    ("relative", "score_table", ["diagonals"]),
    ("buckets", "score_table", ["rows", "diagonals"]),
]


@pytest.mark.parametrize("lengths", [(21, 30), (30, 13), (5, 50)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "array", "walks"), OTHERS)
def test_other_arrays(name, array, walks, causal, deterministic, lengths):
    """Loaded with an index that is computed, or loaded too; at two places; and out of range, where the last counts."""
    spec = Spec(16, 16, F16, deterministic=deterministic, **traced(causal, None, name))
    problem = Problem(spec, 2, 4, 2, *lengths)
    found, taken = gradient(problem, array, on_both(problem))
    magnitudes = ["magnitudes"] * (deterministic and "diagonals" in walks)
    assert sorted(taken) == sorted(walks + magnitudes)
    assert_close(found, dense(problem, array), F16)


@pytest.mark.parametrize(("ones", "causal"), [((1, 1, 0, 0), True), ((1, 1, 1, 0), False), ((0, 0, 0, 0), False)])
def test_a_bias_beside_dropout_and_sinks(ones, causal):
    spec = Spec(16, 16, F16, sinks=F32, dropout=True, **traced(causal, "left", "bias"))
    problem = with_bias(spec, ones)
    found, _ = gradient(problem, "score_biases", on_both(problem))
    assert_close(found, dense(problem, "score_biases"), F16)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "array", "_walks"), OTHERS)
def test_other_arrays_beside_dropout(name, array, _walks, deterministic):
    spec = Spec(16, 16, F16, dropout=True, deterministic=deterministic, **traced(True, None, name))
    problem = Problem(spec, 2, 4, 2, 21, 30)
    found, _ = gradient(problem, array, on_both(problem))
    assert_close(found, dense(problem, array), F16)


@pytest.mark.parametrize("size", [1.0, 1e-30, 3e4])
def test_integers_stand_for_as_much_as_there_is(size):
    """Gradients far below those that float16 has, and far above: the sums of integers are as those of floats."""
    found = []
    for deterministic in (False, True):
        spec = Spec(16, 16, F16, deterministic=deterministic, **traced(True, None, "relative"))
        problem = Problem(spec, 2, 4, 2, 21, 30)
        for name in ("dout", "dlse"):
            problem.arrays[name] = (problem.arrays[name] * size).astype(np.float32)
        found.append(gradient(problem, "score_table", on_tile(problem))[0])
    assert found[0].any()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6 * np.abs(found[0]).max())


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden_by_integers(wrong):
    problem = Problem(Spec(16, 16, F16, deterministic=True, **traced(True, None, "relative")), 2, 4, 2, 21, 30)
    problem.arrays["dout"][0, 0, 3] = wrong
    with np.errstate(invalid="ignore"):
        found, _ = gradient(problem, "score_table", on_tile(problem))
    assert not np.isfinite(found).any()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "array"), [*(case[:2] for case in OTHERS), ("keys", "score_table")])
def test_arrays_of_packed_sequences(name, array, causal, deterministic, used):
    """Each sequence has its own distances, and what hides behind its end adds nothing; so do keys that are not used."""
    functions = traced(causal, None, None if name == "keys" else name)
    if name == "keys":
        functions["score"] = trace.score(lambda score, b, h, q_idx, kv_idx, table: score + table[h, kv_idx // 4])
    spec = Spec(16, 16, F16, deterministic=deterministic, varlen=True, used=used, **functions)
    lengths = {
        "queries": (5, 0, 8, 21, 0, 1),
        "keys": (9, 4, 8, 30, 0, 17),
        "used": (3, 4, 0, 30, 0, 9) if used else (),
    }
    problem = Sequences(spec, heads=4, heads_kv=2, **lengths)
    found, walks = gradient(problem, array, on_both(problem))
    assert "diagonals" not in walks and ("magnitudes" in walks) == deterministic
    expected = sum(
        reference.backward_aux(*given, array=array, **options) for given, options in map(problem.alone, range(6))
    )
    assert_close(found, expected, F16)


@pytest.mark.parametrize("mask", ["document", "nothing"])
def test_an_index_of_the_query_or_of_the_key_that_is_loaded(mask):
    """Rows are added up before they go to the table."""
    problem = Problem(Spec(16, 16, F16, mask=traced(False, mask)["mask"]), 2, 2, 1, 21, 30)
    problem.spec = replace(problem.spec, score=trace.score(positions, (F32, I32)))
    draw = np.random.default_rng(2)
    aux = {"score_table": draw.standard_normal((5, 2)).astype(np.float32)}
    aux["score_ids"] = draw.integers(0, 5, (2, 30)).astype(np.int32)
    problem.aux |= aux
    problem.arrays |= aux
    found, walks = gradient(problem, "score_table", on_both(problem))
    assert walks == ["rows", "columns"]
    assert_close(found, dense(problem, "score_table"), F16)
    assert mask != "nothing" or not found.any()
