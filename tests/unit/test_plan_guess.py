"""The guess of the maximum on Hopper: not the choice where scores may rise with the keys, which explain says."""

import pytest

from flashgen import exp, masks, scores, sin, tanh, variants, where
from flashgen.attention import backward, forward
from flashgen.ir.dtype import F32
from flashgen.plan import cost, planner, sm90, tuned
from flashgen.plan.arch import parse_arch
from flashgen.plan.plan import LAST_FIRST
from flashgen.spec import Spec

HOPPER = parse_arch("sm_90a")

RISING = {
    "alibi": {"score_mod": scores.alibi},
    "slopes": {"score_mod": scores.slopes},
    "behind a cap": {"softcap": 20.0, "score_mod": scores.alibi},
    "product": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + kv_idx * 0.01},
    "in a branch": {"score_mod": lambda score, b, h, q_idx, kv_idx: where(h > 1, score - abs(q_idx - kv_idx), score)},
    "power": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * exp(kv_idx * -0.01)},
}
LEVEL = {
    "softcap": {"softcap": 20.0},
    "bias": {"score_mod": scores.bias},
    "window": {"window": (100, 0)},
    "strided": {"mask_mod": masks.strided(32)},
    "by the query": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + q_idx * 0.01},
    "in a condition": {"score_mod": lambda score, b, h, q_idx, kv_idx: where(kv_idx < 4, score + 1.0, score)},
    "of a wave": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + sin(kv_idx * 0.1)},
    "under a cap": {"score_mod": lambda score, b, h, q_idx, kv_idx: tanh((score - kv_idx) * 0.1)},
}


def made(options, causal=True, head_dim=64, **others):
    """A spec, its forward and the plan for sm_90a."""
    causal, mask, score = variants.functions(causal, **options)
    spec = Spec(head_dim, head_dim, causal=causal, mask=mask, score=score, **others)
    kernel = forward.forward(spec)
    return spec, kernel, planner.plan(kernel, spec, HOPPER)


def twin(candidate, others):
    """The candidate that differs in the guess alone, or in the guess that walks from the last block."""
    traits = (set(candidate.traits) ^ {sm90.GUESS}) - {LAST_FIRST}
    (found,) = [
        other
        for other in others
        if (set(other.candidate.traits), other.candidate.blocks, other.candidate.stages, other.candidate.resident)
        == (traits, candidate.blocks, candidate.stages, candidate.resident)
    ]
    return found


@pytest.mark.parametrize("others", [{}, {"varlen": True}, {"packed": 4}], ids=str)
@pytest.mark.parametrize("name", [*RISING, *LEVEL])
def test_the_guess_is_the_choice_unless_scores_have_the_number_of_the_key(name, others):
    rising = name in RISING
    _, kernel, plan = made((RISING | LEVEL)[name], **others)
    assert cost.rises(kernel) == rising
    backwards = plan.has(LAST_FIRST)
    assert backwards == (name == "alibi" and not others), "where a measurement says so"
    assert plan.has(sm90.GUESS) == (not rising or backwards)
    assert (sm90.RISING in plan.explain()) == (rising and not backwards)
    fitting = [verdict for verdict in plan.verdicts if not verdict.rejection]
    for verdict in fitting:
        other, has = twin(verdict.candidate, plan.verdicts), sm90.GUESS in verdict.candidate.traits
        assert other.rejection or (verdict.cost < other.cost) == (has != rising)
        assert ("most steps twice" in verdict.why) == (has and rising)


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_without_functions_have_no_candidate_without_the_guess(causal):
    _, kernel, plan = made({}, causal)
    assert not cost.rises(kernel) and sm90.RISING not in plan.explain()
    assert all(sm90.GUESS in verdict.candidate.traits for verdict in plan.verdicts)


@pytest.mark.parametrize("name", ["alibi", "softcap"])
def test_what_draws_has_no_guess_for_another_reason(name):
    _, _, plan = made((RISING | LEVEL)[name], dropout=True)
    assert not any(sm90.GUESS in verdict.candidate.traits for verdict in plan.verdicts)
    assert sm90.RISING not in plan.explain()


def test_the_line_without_functions_is_taken_without_its_guess():
    line = tuned.TABLE["sm_90a", "attention_forward", 128, 128, True, "", ""]
    assert sm90.GUESS in line.traits
    _, _, plan = made({"score_mod": scores.slopes, "score_dtypes": (F32,)}, head_dim=128)
    assert line.without(sm90.GUESS).matches(plan.candidate) and not line.matches(plan.candidate)
    assert plan.source.endswith(", without the mask and score functions, with a guess of the maximum")


def test_a_line_of_the_kind_may_have_a_guess(monkeypatch):
    """It was measured with these functions."""
    spec, kernel, plan = made(RISING["slopes"])
    wanted = twin(plan.candidate, plan.verdicts).candidate
    text = tuned.line(kernel.name, spec, HOPPER, wanted, "CARD, DATE, 1 TFLOP/s", "COMMAND")
    monkeypatch.setattr(tuned, "TABLE", tuned.TABLE | eval("{" + text + "}", {"Measured": tuned.Measured}))
    again = planner.plan(kernel, spec, HOPPER)
    assert again.candidate == wanted and again.has(sm90.GUESS) and sm90.RISING not in again.explain()


def test_a_backward_is_planned_as_before():
    spec, _, _ = made(RISING["alibi"])
    plan = planner.plan(backward.backward(spec), spec, HOPPER)
    assert sm90.RISING not in plan.explain() and plan.source == "cost model"
