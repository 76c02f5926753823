"""What the planner rejects, how it orders the rest, and what it says. Which tile is fastest is not asked here."""

import random
import re

import pytest
from verdicts import SMALLEST, judged

from flashgen import build, trace
from flashgen.attention import backward, forward
from flashgen.plan import planner
from flashgen.plan.arch import ARCHES, KIB, parse_arch, with_shared_memory
from flashgen.spec import Spec

REASONS = {
    "shape": r"^\w+ of (\d+) x (\d+) does not divide among the warps into (\d+) x (\d+) pieces$",
    "shared": r"^([\d.]+) KiB of shared memory exceed the ([\d.]+) KiB of a block$",
    "registers": r"^about (\d+) registers a thread exceed (\d+): it would spill$",
}


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_each_rejection_is_a_sentence_that_names_the_limit(make):
    spec = Spec(128, 128)
    seen = set()
    for verdict in judged(make(spec), spec, SMALLEST):
        if not verdict.rejection:
            assert verdict.cost > 0 and "registers" in verdict.why
            continue
        (kind,) = [kind for kind, pattern in REASONS.items() if re.match(pattern, verdict.rejection)]
        numbers = [float(number) for number in re.match(REASONS[kind], verdict.rejection).groups()]
        assert kind == "shape" or numbers[0] > numbers[1] > 0, verdict.rejection
        seen.add(kind)
    assert {"shared", "registers"} <= seen


def test_explain_shows_the_choice_and_every_rejection():
    plan = build.forward(Spec(128, 128, causal=True), SMALLEST)[0].plan
    explained = plan.explain()
    assert str(plan.candidate) in explained and len(plan.verdicts) > 20
    for verdict in plan.verdicts:
        assert f"{verdict.candidate}: {verdict.rejection or verdict.why}" in explained
    costs = [verdict.cost for verdict in plan.verdicts if not verdict.rejection]
    assert costs == sorted(costs) and len(costs) > 1
    assert plan.text() in explained and not any(verdict.why in plan.text() for verdict in plan.verdicts if verdict.why)


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_the_order_is_total_and_the_choice_does_not_depend_on_the_enumeration(monkeypatch, make):
    spec = Spec(64, 64)
    kernel = make(spec)
    plan = planner.plan(kernel, spec, SMALLEST)
    names = [str(verdict.candidate) for verdict in plan.verdicts]
    assert len(set(names)) == len(names), "two candidates of one name: the order among them is chance"
    shuffled = list(planner.candidates(kernel, SMALLEST, planner.head_dims(spec, SMALLEST)))
    random.Random(1).shuffle(shuffled)
    monkeypatch.setattr(planner, "candidates", lambda *_: shuffled)
    again = planner.plan(kernel, spec, SMALLEST)
    assert again == plan and again.verdicts == plan.verdicts


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_a_chip_that_is_too_small_is_told_which_limit(make):
    spec = Spec(128, 128)
    kernel = make(spec)
    with pytest.raises(
        planner.PlanError, match=rf"no tile of {kernel.name} fits sm_86: even .* shared memory exceed the 4 KiB"
    ):
        planner.plan(kernel, spec, with_shared_memory(SMALLEST, 4 * KIB))


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 8)])
@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_what_does_not_fit_is_told_by_the_candidate_that_needs_least(name, dims):
    spec, arch = Spec(*dims), with_shared_memory(parse_arch(name), 4 * KIB)
    kernel = forward.forward(spec)
    verdicts = planner.judged(kernel, arch, planner.head_dims(spec, arch))
    needed = [float(found[1]) for v in verdicts if (found := re.match(REASONS["shared"], v.rejection))]
    with pytest.raises(planner.PlanError, match=rf": {min(needed)} KiB of shared memory exceed the 4 KiB"):
        planner.plan(kernel, spec, arch)


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("bytes_", "text"), [(1, "0.000976562"), (1023, "0.999023"), (2560, "2.5"), (9 * KIB, "9")])
def test_the_limit_is_not_rounded(name, bytes_, text):
    """It was 0 KiB for a block of one byte."""
    spec = Spec(128, 128)
    with pytest.raises(planner.PlanError, match=f" exceed the {text} KiB of a block"):
        planner.plan(forward.forward(spec), spec, with_shared_memory(parse_arch(name), bytes_))


def test_less_shared_memory_takes_less():
    spec = Spec(128, 128)
    for bytes_ in (227 * KIB, 96 * KIB, 64 * KIB, 32 * KIB):
        plan = build.forward(spec, with_shared_memory(parse_arch("sm_90"), bytes_))[0].plan
        assert plan.shared_bytes <= bytes_


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120"])
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_function_is_refused_for_what_it_loads(arch, head_dim, deterministic, caplog):
    """Sixty biases for each element exceed the registers of every tile by the estimate, which is one from above."""

    def biased(score, b, h, q_idx, kv_idx, table):
        return score + sum(table[n, q_idx, kv_idx] for n in range(60))

    caplog.set_level("INFO", "flashgen")
    spec = Spec(head_dim, head_dim, deterministic=deterministic, score=trace.score(biased))
    stages = build.everything(spec, ARCHES[arch])
    sources = {item.plan.source for item in stages.values()}
    assert "the fewest registers: it may spill" in sources and "may spill" in caplog.text
    assert all(item.source.text for item in stages.values())
