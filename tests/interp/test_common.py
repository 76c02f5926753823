"""Rounding and expressions, against exact definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.interp.common import Uniform, cdiv, evaluate, round_to
from flashgen.ir.dtype import BF16, F16, F32, I32
from flashgen.ir.expr import BINARY, Binary, Cast, Const, Select, Unary, Var, exp2, log, maximum, minimum

X, Y = Var("x"), Var("y")


def value(expr, **names):
    return evaluate(expr, Uniform(names))


def nearest_bf16(x):
    """By definition: the candidate of least distance, an even last bit on a tie."""
    bits = int(np.float32(x).view(np.uint32))
    low = bits & 0xFFFF0000
    down, up = (np.uint32(b).view(np.float32) for b in (low, low + 0x10000))
    below, above = abs(float(x) - float(down)), abs(float(up) - float(x))
    if above == below:
        return down if (low >> 16) % 2 == 0 else up
    return down if below < above else up


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127))
def test_bfloat16_is_the_nearest_value(x):
    assert round_to(BF16, np.float32(x)) == nearest_bf16(x)


def test_float16_is_the_nearest_value():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(round_to(F16, x), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_extremes(dtype):
    x = np.array([np.nan, np.inf, -np.inf, 3.4028235e38, -3.4028235e38, 0.0, -0.0], np.float32)
    expected = np.array([np.nan, np.inf, -np.inf, np.inf, -np.inf, 0.0, -0.0], np.float32)
    result = round_to(dtype, x)
    np.testing.assert_array_equal(result, expected)
    assert result.dtype == np.float32 and np.signbit(result[-1])


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
def test_every_nan_stays_nan(bits):
    assert np.isnan(round_to(BF16, np.array([bits], np.uint32).view(np.float32))).all()


def test_rounding_leaves_its_argument_alone():
    x = np.array([1.001], np.float32)
    round_to(BF16, x)
    round_to(F32, x)
    assert x[0] == np.float32(1.001)


@given(st.integers(0, 1000), st.integers(1, 50), st.sampled_from(["+", "-", "*", "//", "%", "min", "max"]))
def test_integers_stay_python_integers_and_arrays_agree(x, y, op):
    expected = BINARY[op](x, y)
    result = value(Binary(op, X, Y), x=x, y=y)
    assert result == expected and type(result) is int
    np.testing.assert_array_equal(value(Binary(op, X, Y), x=np.array([x, x]), y=y), [expected] * 2)
    assert value(cdiv_expr(), x=x, y=y) == cdiv(x, y)


def cdiv_expr():
    return (X + Y - 1) // Y


def test_everything_floating_is_float32():
    array, index = np.linspace(-1, 1, 5, dtype=np.float32), np.arange(1, 6)
    exprs = [X * Y, X + 0.1, exp2(Y), Y / 2, Const(1) / Y, minimum(X, Y), X * exp2(Const(0.5)), Cast(BF16, Y * 0.1), -X]
    for expr in exprs:
        assert value(expr, x=array, y=index).dtype == np.float32, expr
    assert value(Const(1) / Const(4)) == 0.25


def test_temporaries_are_reused_but_never_the_operands():
    x = np.linspace(0, 1, 7, dtype=np.float32)
    kept = x.copy()
    result = value((Cast(F32, X) + 1.0) * X - Unary("neg", X) * 2.0, x=x)
    np.testing.assert_array_equal(x, kept)
    np.testing.assert_allclose(result, (kept + 1) * kept + 2 * kept, rtol=1e-6)
    value(Binary("*", Cast(F32, X), Const(2.0)), x=x)
    value(Binary("*", Select(X >= 0.0, X, X), Const(2.0)), x=x)
    np.testing.assert_array_equal(x, kept)


def test_select_keeps_the_other_side_from_leaking():
    x = np.array([0.0, 1.0], np.float32)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(value(Select(X.equals(0.0), Const(0.0), Const(1.0) / X), x=x), [0.0, 1.0])
        np.testing.assert_array_equal(value(maximum(log(X), -1.0), x=x), [-1.0, 0.0])


def test_logic_and_casts():
    x = np.arange(4)
    np.testing.assert_array_equal(value((X > 0) & (X < 3) | X.equals(0), x=x), [True, True, True, False])
    np.testing.assert_array_equal(value(Cast(I32, Var("f")), f=np.array([1.7, 2.2], np.float32)), [1, 2])
