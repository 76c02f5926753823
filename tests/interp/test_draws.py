"""Drawn masks and score functions on the machine interpreter, for both families: what the tile interpreter gives."""

from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("torch")

import draws
from attention_cases import Problem
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lowered_cases import Choice, compare, plans
from test_sm90 import equals_tile, lowered
from test_sm90_backward import ARCH
from test_sm90_backward import equals_tile as backward_equals_tile

from flashgen import build
from flashgen.plan.sm90_backward import KERNELS

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=SLOW, print_blob=True)


def problem(drawn):
    """The problem of a draw, with the kernel's names and types of its arrays."""
    aux = drawn.aux("cpu")
    kernel = drawn.compile(target="interpret")
    kernel, arrays, _ = kernel.resolve(aux.get("mask"), aux.get("score"))
    sizes = drawn.sizes
    return Problem(
        kernel.spec,
        *(sizes.batch, sizes.heads, sizes.heads_kv, sizes.seqlen_q, sizes.seqlen_k),
        seed=drawn.seed,
        scale=drawn.scale or 0.0,
        given={name: (x.float() if x.is_floating_point() else x).numpy() for name, x in arrays.items()},
    )


@EXAMPLES
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.sampled_from([(1, 1), (2, 2)]))
def test_draws_on_the_toy_chip(rng, depth, stages):
    case = problem(draws.draw(rng, longest=40, head_dims=(8, 16, 24), depth=depth))
    chosen = plans(case, Choice(2, 1, 16, stages))
    assume(chosen is not None)
    compare(case, chosen)


def test_draws_on_hopper():
    """The forward of each, and the backward where it is the family's own and not left to the portable kernels."""
    own = 0
    for number in range(1000, 1016):
        drawn = draws.numbered(number)
        width = 64 if number % 2 else 128
        options = drawn.options | {"head_dim": width, "head_dim_v": width, "deterministic": number % 4 == 0}
        sizes = drawn.sizes._replace(batch=1, heads=2, heads_kv=1, seqlen_q=min(150, drawn.sizes.seqlen_q))
        case = problem(replace(drawn, options=options, sizes=sizes))
        kernel, chosen = lowered(case.spec, warpgroups=2, traits=("dynamic", "in turns", "guessed maximum"))
        equals_tile(case.spec, case, kernel, chosen, seeds=(0,))
        for stages in build.backward(case.spec, ARCH)[1:]:
            if stages.plan.arch == ARCH and stages.tile.name in KERNELS:
                backward_equals_tile(case, stages.tile, seeds=(0,))
                own += 1
    assert own >= 12
