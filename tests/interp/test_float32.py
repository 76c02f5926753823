"""float32 on both interpreters, forward and backward, against dense float64 attention; TF32; a run in float64."""

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from functions import traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled

from flashgen import build, lower
from flashgen.interp import common, machine, tf32
from flashgen.ir.dtype import BF16, FP32, TF32
from flashgen.ir.nodes import Gemm
from flashgen.ir.visit import statements
from flashgen.machine.sm80 import MmaSync
from flashgen.plan.arch import parse_arch, with_shared_memory
from flashgen.spec import Spec

ROOMY = with_shared_memory(parse_arch("toy"), 64 * 1024)
CHOICES = [
    Choice(2, 1, 16, (2, 1)),
    Choice(1, 2, 32, (1, 2)),
    Choice(4, 1, 32, (2, 2), split=2),
]
FUNCTIONS = [
    {"causal": True},
    {"mask": "left"},
    {"mask": "by head", "score": "wave"},
    {"causal": True, "score": "alibi"},
    {"mask": "document", "score": "bias"},
    {"mask": "nothing"},
    {"causal": True, "softcap": 3.0, "window": (9, None)},
]
NUMBERS = np.array([0.0, 1.0, -1.0 - 2.0**-11, 1.0 + 2.0**-11, 1.0 + 2.0**-12, 2.0**-130, np.inf, -np.inf, np.nan])


def test_rounding_to_tf32():
    """10 bits of the fraction are left; ties go away from zero, and what is infinite or no number stays that."""
    x = NUMBERS.astype(np.float32)
    want = np.array([0.0, 1.0, -1.0 - 2.0**-10, 1.0 + 2.0**-10, 1.0, 2.0**-130, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(tf32.rounded(x), want)
    random = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for part in (tf32.rounded(random), tf32.cut(random)):
        assert not (part.view(np.uint32) & 0x1FFF).any()
    assert np.abs(tf32.rounded(random) / random - 1).max() <= 2.0**-11
    assert (np.abs(tf32.cut(random)) <= np.abs(random)).all()


@pytest.mark.parametrize("positive", [False, True])
def test_three_products_are_as_good_as_float32(positive):
    rng = np.random.default_rng(1)
    a, b = (rng.random((64, 64)) if positive else rng.standard_normal((64, 64)) for _ in range(2))
    a, b = a.astype(np.float32), b.astype(np.float32)
    exact = a.astype(np.float64) @ b
    size = np.abs(a).astype(np.float64) @ np.abs(b)
    assert (np.abs(tf32.matmul(FP32, a, b) - exact) / size).max() < 2.0**-20
    assert 2.0**-14 < (np.abs(tf32.matmul(TF32, a, b) - exact) / size).max() < 2.0**-10
    np.testing.assert_array_equal(tf32.matmul(BF16, a, b), a @ b)


@pytest.mark.parametrize("dtype", [FP32, TF32], ids=lambda dtype: dtype.cuda)
@pytest.mark.parametrize("options", FUNCTIONS, ids=str)
def test_tile_interpreter(options, dtype):
    problem = Problem(Spec(24, 16, dtype, **traced(**options)), 2, 4, 2, 37, 45)
    assert_close(tiled(problem), problem.dense(), dtype)


@pytest.mark.parametrize("dtype", [FP32, TF32], ids=lambda dtype: dtype.cuda)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_machine_interpreter(choice, deterministic, dtype):
    """Free of hazards, equal to the TILE form up to the order of sums, and as near to float64."""
    for causal, lengths in ((True, (37, 45)), (False, (16, 33)), (True, (45, 20))):
        problem = Problem(Spec(32, 24, dtype, causal, deterministic), 1, 2, 1, *lengths)
        chosen = plans(problem, choice, ROOMY)
        assert chosen is not None
        compare(problem, chosen, seeds=range(2))
        assert_close(run(problem, chosen), problem.dense(), dtype)


def run(problem, chosen):
    """All kernels by the machine interpreter, one after another."""
    arrays = {**problem.arrays, **problem.outputs(problem.dims() | dict(chosen["attention_backward"].sizes))}
    for kernel in problem.kernels():
        machine.run(lower.run(kernel, chosen[kernel.name]), chosen[kernel.name], arrays, problem.scalars)
    return arrays


@pytest.mark.parametrize("options", [FUNCTIONS[2], FUNCTIONS[4]], ids=str)
def test_machine_interpreter_with_functions(options):
    problem = Problem(Spec(16, 16, FP32, **traced(**options)), 2, 2, 1, 21, 30)
    compare(problem, plans(problem, CHOICES[0], ROOMY))


def test_unaligned_rows_and_dropout():
    problem = Problem(Spec(16, 16, FP32, causal=True, aligned=False, dropout=True), 1, 2, 2, 21, 30)
    compare(problem, plans(problem, CHOICES[0], ROOMY))
    assert_close(tiled(problem), problem.dense(), FP32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_90a"])
@pytest.mark.parametrize("dtype", [FP32, TF32], ids=lambda dtype: dtype.cuda)
def test_products_of_real_plans(dtype, arch):
    """Every product is an mma.sync of operands of the type; sm_90a takes the kernels of its portable record."""
    for stages in build.everything(Spec(64, 64, dtype, causal=True), parse_arch(arch)).values():
        assert stages.plan.arch.family == "sm80"
        found = [stmt for stmt in statements(stages.machine.body) if isinstance(stmt, MmaSync)]
        assert all(stages.machine.buffer(stmt.b.buffer).dtype == dtype for stmt in found)
        assert len(found) == sum(isinstance(stmt, Gemm) for stmt in statements(stages.tile.body))
        assert f"using element = {dtype.cuda};" in stages.source.text
        assert any(name == "flashgen/tf32.cuh" for name, _ in stages.source.headers)


def test_sums_that_go_on_are_added_by_themselves():
    """O, dK and dV, to which every step adds; the scores, dP and dQ start at zero in each."""
    made = build.everything(Spec(64, 64, FP32, causal=True), parse_arch("sm_80"))
    text = "".join(stages.source.text for stages in made.values())
    assert text.count("add_packed_tf32<") + text.count("add_shared_tf32<") == 3
    assert text.count("multiply_shared_tf32<") == 4
    half = build.forward(Spec(64, 64, BF16), parse_arch("sm_80"))[0].source
    assert "tf32" not in half.text and len(half.headers) == 2


@pytest.mark.parametrize("options", [*FUNCTIONS, {"causal": True, "score": "gate"}], ids=str)
def test_a_run_in_float64_has_no_rounding(options):
    """The same loop nest with every number in float64: what is left are a few of its roundings."""
    problem = Problem(Spec(24, 16, FP32, **traced(**options)), 2, 4, 2, 37, 45)
    for name, array in problem.arrays.items():
        if array.dtype == np.float32:
            problem.arrays[name] = array.astype(np.float64)
    problem.aux = {name: problem.arrays[name] for name in problem.aux}
    poisoned = problem.outputs
    problem.outputs = lambda dims: {name: x.astype(np.float64) for name, x in poisoned(dims).items()}
    with common.in_float64():
        found = tiled(problem)
    assert common.real() is np.float32
    for name, want in problem.dense().items():
        finite = np.isfinite(want)
        assert found[name].dtype == np.float64
        np.testing.assert_array_equal(found[name][~finite], want[~finite])
        np.testing.assert_allclose(found[name][finite], want[finite], rtol=0, atol=1e-12, err_msg=name)
