"""Drawn masks, score functions, options and shapes on the interpreter, against dense float64 and torch's autograd."""

from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")
torch = pytest.importorskip("torch")

import draws  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW, print_blob=True)


@EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_what_is_drawn_is_dense_attention(rng, depth):
    drawn = draws.draw(rng, longest=90, head_dims=(8, 16, 24, 32, 40, 64), depth=depth)
    found = drawn.failures(drawn.compile(target="interpret"), "cpu")
    assert not found, "\n".join([str(drawn), *found])


@pytest.mark.parametrize("part", range(4))
def test_draws_by_number(part):
    """The ones that run on GPUs, of which most have several tiles and wide heads."""
    for number in range(part, 200, 16):
        drawn = draws.numbered(number)
        found = drawn.failures(drawn.compile(target="interpret"), "cpu")
        assert not found, "\n".join([f"draw {number}: {drawn}", *found])


def test_a_draw_is_made_again_from_its_number():
    assert [str(draws.numbered(n)) for n in range(50)] == [str(draws.numbered(n)) for n in range(50)]
    assert draws.numbered(3).compile().spec == draws.numbered(3).compile().spec


def test_draws_use_the_whole_grammar():
    texts = "\n".join(str(draws.numbered(number)) for number in range(200))
    words = ("where", "exp", "log", "tanh", "sin", "cos", "abs", "minimum", "maximum", "sigmoid", "sqrt", "seqlen_q")
    operations = ("&", "|", "~", "//", "%", "==", "!=", "<", ">=", "t[", "top-left", "-inf", "'int32'", "form='turned'")
    assert [word for word in (*(f"fg.{word}" for word in words), *operations) if word not in texts] == []
    ranks = {len(array.axes) for n in range(200) for f in draws.numbered(n).functions.values() for array in f.arrays}
    assert ranks == {1, 2, 3}


def test_a_wrong_result_is_a_failure():
    """What is compared with does not follow the kernel: half the score is not the score."""
    drawn = next(d for d in map(draws.numbered, range(50)) if d.sizes.seqlen_k > 60 and not d.options["window"])
    plain = replace(drawn, functions={})
    kernel = plain.compile(target="interpret")
    assert plain.failures(kernel, "cpu") == []
    halved = replace(drawn, functions={"score": draws.Function("score", "0.5 * score", ())})
    assert halved.failures(kernel, "cpu") and halved.failures(halved.compile(target="interpret"), "cpu") == []
