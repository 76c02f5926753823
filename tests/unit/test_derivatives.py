"""Derivatives of score functions against torch's autograd, and which of them stay finite."""

import math

import pytest

import flashgen as fg
from flashgen import trace
from flashgen.calculus import derivative, tame
from flashgen.ir.expr import Const, text

torch = pytest.importorskip("torch")

import support  # noqa: E402
from functions import SCORES  # noqa: E402

ELEMENTS = {"score", "q_idx", "kv_idx"}
MORE = {
    "powers": lambda s, b, h, q, k: s**3 - 2 * s + 1 / (s * s + 1),
    "exponentials": lambda s, b, h, q, k: fg.log(fg.exp(s) + 1) * fg.exp2(-s),
    "waves": lambda s, b, h, q, k: fg.sin(s * 2) * fg.cos(s + k),
    "clamped": lambda s, b, h, q, k: fg.minimum(fg.maximum(s, -0.7), 0.6 + h),
    "chosen": lambda s, b, h, q, k: fg.where(s > 0.1, s * q, fg.tanh(s) * s),
}


@pytest.mark.parametrize("name", [*SCORES, *MORE])
def test_the_derivative_is_that_of_autograd(name):
    function = trace.score((SCORES | MORE)[name])
    score = torch.randn(2, 3, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    names = support._names(score) | {"score": score}
    out = support.value(function.expr, names)
    (expected,) = torch.autograd.grad(torch.where(out == -math.inf, 0.0, out).sum(), score)
    found = support.value(derivative(function.expr, "score"), names).broadcast_to(score.shape)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, q, k: s + q * 0.5, "1.0"),
        (lambda s, b, h, q, k: 3.0 * s, "3.0"),
        (lambda s, b, h, q, k: fg.where(q > k, s, -math.inf), "select(q_idx > kv_idx, 1.0, 0.0)"),
        (lambda s, b, h, q, k: 2 * fg.tanh(s / 2), "1.0 - tanh(score * 0.5) * tanh(score * 0.5)"),
    ],
)
def test_a_derivative_is_short(function, expected):
    assert text(derivative(trace.score(function).expr, "score")) == expected


def test_of_another_variable_it_is_zero():
    assert derivative(trace.score(SCORES["alibi"]).expr, "nothing") == Const(0.0)


@pytest.mark.parametrize(
    ("function", "value", "slope"),
    [
        (SCORES["softcap"], True, True),
        (SCORES["alibi"], True, True),
        (SCORES["masking"], True, True),
        (lambda s, b, h, q, k: fg.sqrt(abs(s)), False, False),
        (lambda s, b, h, q, k: s + fg.exp(q), False, True),
        (lambda s, b, h, q, k: s * fg.where(q > k, 1.0, -math.inf), False, False),
        (lambda s, b, h, q, k: s - fg.where(q > k, 0.0, math.inf), False, True),
    ],
)
def test_what_stays_finite(function, value, slope):
    expr = trace.score(function).expr
    assert tame(expr, ELEMENTS) is value
    assert tame(derivative(expr, "score"), ELEMENTS, negative_infinity=False) is slope
