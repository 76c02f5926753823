"""Measured choices: each line names one candidate that fits, and is heeded; the others are told."""

from dataclasses import replace

import pytest
from verdicts import SMALLEST, judged

from flashgen import build, variants
from flashgen.attention import backward, forward
from flashgen.plan import planner, tuned
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec


def every(kernel, spec, arch):
    """Verdicts of the candidates of any family."""
    return planner.judged(kernel, arch, planner.head_dims(spec, arch))


class Preferred:
    note = "made up, 1.00 ms"

    def __init__(self, candidate):
        self.candidate = candidate

    def matches(self, candidate):
        return candidate == self.candidate


def test_a_measurement_overrides_the_cost_model_where_it_fits(monkeypatch):
    spec = Spec(64, 64)
    kernel = forward.forward(spec)
    monkeypatch.setattr(planner.tuned, "lookup", lambda *_: None)
    verdicts = planner.plan(kernel, spec, SMALLEST).verdicts
    for wanted, heeded in ((verdicts[1], True), (verdicts[-1], False)):
        assert bool(wanted.rejection) != heeded
        monkeypatch.setattr(planner.tuned, "lookup", lambda *_, wanted=wanted: Preferred(wanted.candidate))
        plan = planner.plan(kernel, spec, SMALLEST)
        assert (plan.candidate == wanted.candidate) == heeded
        assert (plan.source == "measurement: made up, 1.00 ms") == heeded


def measured(candidate, note="made up"):
    return tuned.Measured(candidate.blocks, candidate.warps, candidate.depths, note, candidate.split)


PLANNED = {
    "attention_forward": (forward.forward, False),
    "attention_backward": (backward.backward, False),
    "attention_backward_dq": (backward.backward_dq, True),
}


def ill_fitting(table):
    """A sentence for each line of a table that names no candidate, several, or one that is rejected."""
    for (chip, name, head_dim, head_dim_v, causal, length), line in table.items():
        make, deterministic = PLANNED[name]
        spec = Spec(head_dim, head_dim_v, causal=causal, deterministic=deterministic, length=length)
        found = [verdict for verdict in every(make(spec), spec, parse_arch(chip)) if line.matches(verdict.candidate)]
        if len(found) != 1:
            yield f"{chip} {name} {spec}: {len(found)} candidates have these blocks, warps, stages and split"
        yield from (f"{chip} {name} {spec}: {verdict.rejection}" for verdict in found if verdict.rejection)


def test_every_measured_line_names_a_candidate_that_fits():
    assert list(ill_fitting(tuned.TABLE)) == []


@pytest.mark.parametrize("name", PLANNED)
def test_a_planted_measured_line_is_checked(name):
    make, deterministic = PLANNED[name]
    spec = Spec(128, 128, causal=True, deterministic=deterministic)
    verdicts = planner.plan(make(spec), spec, SMALLEST).verdicts
    key = (SMALLEST.name, name, 128, 128, True, "")
    good = [measured(verdict.candidate) for verdict in verdicts if not verdict.rejection]
    bad = measured(next(verdict.candidate for verdict in verdicts if verdict.rejection and not verdict.unfit))
    assert good and all(list(ill_fitting({key: line})) == [] for line in good)
    assert "exceed" in " ".join(ill_fitting({key: bad}))
    for change in ({"warps": 3}, {"stages": (9,)}, {"split": 4}, {"blocks": (("block_q", 8),)}):
        (said,) = ill_fitting({key: replace(good[0], **change)})
        assert said.startswith("sm_86 " + name) and "0 candidates" in said


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_a_measured_line_tells_all_candidates_apart(make):
    spec = Spec(128, 128)
    offered = [verdict.candidate for verdict in judged(make(spec), spec, SMALLEST)]
    assert all([other for other in offered if measured(one).matches(other)] == [one] for one in offered)
    assert (len({one.split for one in offered}) > 1) == (make is backward.backward)


def test_a_measured_line_that_does_not_fit_is_said_in_the_plan(monkeypatch):
    spec = Spec(64, 64, causal=True)
    kernel = forward.forward(spec)
    usual = planner.plan(kernel, spec, SMALLEST)
    line = replace(measured(usual.candidate), warps=3)
    monkeypatch.setitem(tuned.TABLE, (SMALLEST.name, kernel.name, 64, 64, True, ""), line)
    plan = planner.plan(kernel, spec, SMALLEST)
    assert plan.candidate == usual.candidate
    assert "chosen by cost model; the measured choice does not fit" in plan.text()


def test_a_line_is_what_the_table_takes():
    """For the forward and for a split backward: the text evaluates to the item that chooses the candidate."""
    spec = Spec(128, 128, causal=True)
    for kernel in (forward.forward(spec), backward.backward(spec)):
        splits = {}
        for verdict in planner.plan(kernel, spec, SMALLEST).verdicts:
            splits.setdefault(verdict.candidate.split, verdict.candidate)
        for split, candidate in splits.items():
            text = tuned.line(kernel.name, spec, SMALLEST, candidate, "CARD, DATE, 1 TFLOP/s", "COMMAND --x")
            made = eval("{" + text + "}", {"Measured": tuned.Measured})
            note = "CARD, DATE, 1 TFLOP/s: COMMAND --x"
            assert made == {("sm_86", kernel.name, 128, 128, True, ""): measured(candidate, note)}
            assert ("split" in text) == (split > 1) and all(len(line) <= 120 for line in text.splitlines())


# --- lengths ----------------------------------------------------------------------------------------------------------

HOPPER = parse_arch("sm_90a")
LINES = sorted({key[:-1] for key in tuned.TABLE if key[-1]})


def spec_of(key, **others):
    return Spec(key[2], key[3], causal=key[4], **others)


def test_every_line_of_a_length_has_its_limit_and_the_usual_one_beside_it():
    assert LINES
    for key, line in tuned.TABLE.items():
        assert (line.limit > 0) == bool(key[-1])
        assert (*key[:-1], "") in tuned.TABLE
    for key in LINES:
        short, long = (tuned.TABLE.get((*key, name)) for name in ("short", "long"))
        assert not (short and long) or short.limit < long.limit


@pytest.mark.parametrize("key", LINES)
def test_a_call_takes_the_tile_of_its_length(key):
    spec, seen = spec_of(key), set()
    for seqlen_k in (0, 1, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 8191, 8192, 10**6):
        made = build.for_sizes(spec, HOPPER, 4096, seqlen_k, 1)
        line = tuned.TABLE[*key, made.length]
        plan = build.forward(made, HOPPER)[0].plan
        assert line.matches(plan.candidate) and plan.source == f"measurement: {line.note}"
        assert made.length != "short" or seqlen_k <= line.limit
        assert made.length != "long" or seqlen_k >= line.limit
        seen.add(made.length)
    assert seen == {"", *(name for name in ("short", "long") if (*key, name) in tuned.TABLE)}


@pytest.mark.parametrize("key", LINES)
def test_what_was_not_measured_takes_the_usual_tile(key):
    """Other chips, functions, packed heads and the backward."""
    usual = spec_of(key)
    _, mask, score = variants.functions(False, window=(128, 0), softcap=20.0)
    for seqlen_k in (16, 10**6):
        assert build.for_sizes(usual, parse_arch("sm_80"), 4096, seqlen_k, 1).length == ""
        for given in ({"mask": mask}, {"score": score}, {"aligned": False}, {"varlen": True}, {"dropout": True}):
            assert build.for_sizes(spec_of(key, **given), HOPPER, 4096, seqlen_k, 1).length == ""
        assert build.for_sizes(usual, HOPPER, 1, seqlen_k, 8) == replace(usual, packed=8)
    for name in ("short", "long"):
        given = replace(usual, length=name)
        assert build.backward(given, HOPPER) == build.backward(usual, HOPPER)
        assert build.forward(given, parse_arch("sm_80")) == build.forward(usual, parse_arch("sm_80"))


def test_the_plan_says_which_calls_take_another_tile():
    for name, words in (("short", "of up to {} keys"), ("long", "of {} keys and more")):
        for key in LINES:
            line = tuned.TABLE.get((*key, name))
            said = f"calls {words.format(line.limit)} take a tile of" if line else f"--length {name}"
            for spec, wanted in ((spec_of(key), bool(line)), (spec_of(key, packed=8), False)):
                assert (said in build.forward(spec, HOPPER)[0].plan.explain()) == wanted


def test_a_length_is_one_of_three():
    with pytest.raises(ValueError, match="length = 'medium' must be one of"):
        Spec(64, 64, length="medium")
    assert str(Spec(64, 64, causal=True, length="short")) == "d64_bf16_causal_short"
