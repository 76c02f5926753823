"""Measured choices: each line names one candidate that fits, and is heeded; the others are told."""

from dataclasses import replace

import pytest
from tuned_lines import KINDS, of_variant, spec_of
from verdicts import SMALLEST

from flashgen import build, masks, scores, variants
from flashgen.attention import backward, forward
from flashgen.bench.variants import OF_ONE_LENGTH
from flashgen.ir.dtype import F32
from flashgen.plan import planner, sm90, tuned
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
    split, traits, resident = candidate.split, candidate.traits, candidate.resident
    return tuned.Measured(candidate.blocks, candidate.warps, candidate.depths, note, split, traits, resident)


PLANNED = {
    "attention_forward": (forward.forward, False),
    "attention_backward": (backward.backward, False),
    "attention_backward_dq": (backward.backward_dq, True),
}


def ill_fitting(table):
    """A sentence for each line of a table that names no candidate, several, or one that is rejected."""
    for key, line in table.items():
        chip, name, *_ = key
        make, spec = PLANNED[name][0], spec_of(key)
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
    key = (SMALLEST.name, name, 128, 128, True, "", "")
    good = [measured(verdict.candidate) for verdict in verdicts if not verdict.rejection]
    bad = measured(next(verdict.candidate for verdict in verdicts if verdict.rejection and not verdict.unfit))
    assert good and all(list(ill_fitting({key: line})) == [] for line in good)
    assert "exceed" in " ".join(ill_fitting({key: bad}))
    for change in ({"warps": 3}, {"stages": (9,)}, {"split": 4}, {"blocks": (("block_q", 8),)}):
        (said,) = ill_fitting({key: replace(good[0], **change)})
        assert said.startswith("sm_86 " + name) and "0 candidates" in said


@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_a_measured_line_tells_all_candidates_apart(make, arch):
    spec = Spec(64, 64, causal=True)
    offered = [verdict.candidate for verdict in every(make(spec), spec, parse_arch(arch))]
    assert all([other for other in offered if measured(one).matches(other)] == [one] for one in offered)
    assert (len({one.split for one in offered}) > 1) == (make is backward.backward and arch == "sm_86")
    assert (len({one.resident for one in offered}) > 1) == (make is forward.forward and arch == "sm_90a")


def test_a_measured_line_that_does_not_fit_is_said_in_the_plan(monkeypatch):
    spec = Spec(64, 64, causal=True)
    kernel = forward.forward(spec)
    usual = planner.plan(kernel, spec, SMALLEST)
    line = replace(measured(usual.candidate), warps=3)
    monkeypatch.setitem(tuned.TABLE, (SMALLEST.name, kernel.name, 64, 64, True, "", ""), line)
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
            assert made == {("sm_86", kernel.name, 128, 128, True, "", ""): measured(candidate, note)}
            assert ("split" in text) == (split > 1) and all(len(line) <= 120 for line in text.splitlines())


def test_a_line_says_how_many_blocks_run_together():
    spec = Spec(64, 64, causal=True)
    offered = [item.candidate for item in every(forward.forward(spec), spec, HOPPER) if not item.rejection]
    for resident in sm90.RESIDENT_REGISTERS:
        candidate = next(one for one in offered if one.resident == resident)
        text = tuned.line("attention_forward", spec, HOPPER, candidate, "CARD, DATE, 1 TFLOP/s", "COMMAND --x")
        (made,) = eval("{" + text + "}", {"Measured": tuned.Measured}).values()
        assert made == measured(candidate, made.note) and f"resident={resident}" in text
        assert str(candidate).endswith(f"{resident} blocks a multiprocessor")


# --- lengths ----------------------------------------------------------------------------------------------------------

HOPPER = parse_arch("sm_90a")
LINES = sorted({key[:-1] for key in tuned.TABLE if key[-1]})
OF_FORWARD = [key for key in LINES if key[1] == "attention_forward"]
OF_BACKWARD = [key for key in LINES if key[1] == "attention_backward"]
PLAIN = [key for key in LINES if not key[-1]]


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
        if key in OF_FORWARD:
            made = build.for_sizes(spec, HOPPER, 4096, seqlen_k, 1)
            plan = build.forward(made, HOPPER)[0].plan
        else:
            made = build.backward_for_sizes(spec, HOPPER, seqlen_k)
            plan = build.backward(made, HOPPER)[1].plan
        line = tuned.TABLE[*key, made.length]
        assert line.matches(plan.candidate) and plan.source == f"measurement: {line.note}"
        assert made.length != "short" or seqlen_k <= line.limit
        assert made.length != "long" or seqlen_k >= line.limit
        seen.add(made.length)
    assert seen == {"", *(name for name in ("short", "long") if (*key, name) in tuned.TABLE)}


@pytest.mark.parametrize("key", PLAIN)
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
        same = ("sm_90a", "attention_backward", *key[2:], name) not in tuned.TABLE
        assert (build.backward(given, HOPPER) == build.backward(usual, HOPPER)) == same
        assert build.forward(given, parse_arch("sm_80")) == build.forward(usual, parse_arch("sm_80"))


@pytest.mark.parametrize("key", OF_BACKWARD)
def test_what_of_the_backward_was_not_measured_takes_the_usual_tile(key):
    """Where deterministic the main kernel leaves dQ to another, and takes other tiles."""
    _, mask, score = variants.functions(False, window=(128, 0), softcap=20.0)
    assert build.backward_for_sizes(spec_of(key), HOPPER, 16).length == "short"
    assert build.backward_for_sizes(spec_of(key), parse_arch("sm_80"), 16).length == ""
    others = ({"mask": mask}, {"score": score}, {"varlen": True}, {"dropout": True}, {"deterministic": True})
    for given in others:
        spec = spec_of(key, **given)
        assert build.backward_for_sizes(spec, HOPPER, 16).length == ""
        assert build.backward(replace(spec, length="short"), HOPPER) == build.backward(spec, HOPPER)
    assert "does not fit" not in build.backward(spec_of(key, deterministic=True), HOPPER)[1].plan.text()


def test_masks_whose_blocks_are_listed_have_a_line_of_their_own_but_with_scores():
    key = ("sm_90a", "attention_forward", 64, 64, True, tuned.LISTED, "")
    listed = spec_of(key)
    assert tuned.lookup(key[1], listed, HOPPER) == tuned.TABLE[key]
    assert tuned.lookup(key[1], replace(listed, listed=False), HOPPER) != tuned.TABLE[key]
    _, _, score = variants.functions(False, softcap=20.0)
    assert tuned.lookup(key[1], replace(listed, score=score), HOPPER) != tuned.TABLE[key]


def test_a_window_of_many_keys_is_of_a_kind_of_its_own_and_that_of_packed_heads():
    """Few rows of a tile pay where it has few steps."""

    def chosen(window, **more):
        causal, mask, _ = variants.functions(True, window=window)
        spec = Spec(64, 64, causal=causal, mask=mask, **more)
        return tuned.kind(spec), build.forward(spec, HOPPER)[0].plan.candidate.resident

    for window in ((16, 0), (tuned.NARROW, 0), (0, tuned.NARROW)):
        assert chosen(window) == ("window", 3) and chosen(window, varlen=True) == ("window", 3)
        assert chosen(window, packed=4) == ("wide_window", 1)
    for window in ((tuned.NARROW, 1), (100000, 0)):
        assert chosen(window) == ("wide_window", 1)
    assert chosen((tuned.NARROW + 1, None)) == ("window_all", 1)


def test_a_plan_says_with_what_mask_a_line_for_lists_was_measured():
    spec = spec_of(("sm_90a", "attention_forward", 64, 64, True, tuned.LISTED, ""))
    chunked = variants.functions(True, mask_mod=masks.chunked(512))[1]
    for mask in (spec.mask, chunked):
        plan = build.forward(replace(spec, mask=mask), HOPPER)[0].plan
        assert plan.candidate.resident == 3 and plan.source.endswith(", with documents for the mask")
    packed = build.forward(replace(spec, packed=4), HOPPER)[0].plan
    assert packed.candidate.resident == 1


def test_the_plan_says_which_calls_take_another_tile():
    for name, words in (("short", "of up to {} keys"), ("long", "of {} keys and more")):
        for key in OF_FORWARD:
            line = tuned.TABLE.get((*key, name))
            said = f"calls {words.format(line.limit)} take a tile of" if line else f"--length {name}"
            for spec, wanted in ((spec_of(key), bool(line)), (spec_of(key, packed=8), False)):
                assert (said in build.forward(spec, HOPPER)[0].plan.explain()) == wanted


def test_a_length_is_one_of_three():
    with pytest.raises(ValueError, match="length = 'medium' must be one of"):
        Spec(64, 64, length="medium")
    assert str(Spec(64, 64, causal=True, length="short")) == "d64_bf16_causal_short"


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_kind_is_what_the_functions_are_without_their_numbers():
    assert list(KINDS) == ["", "softcap", "alibi", "bias_bf16", "bias_bf16_tiled", "window", "document_int"]

    def kind(**options):
        causal, mask, score = variants.functions(True, **options)
        return tuned.kind(Spec(mask=mask, score=score, causal=causal))

    assert kind(window=(64, 0)) == kind(window=(1024, 3)) == "window" != kind(window=(None, 3))
    assert kind(window=(64, 0), softcap=0.5, score_mod=scores.alibi) == "window_softcap_alibi"
    assert kind(score_mod=scores.bias, score_dtypes=(F32,)) == "bias_float"
    assert kind(mask_mod=masks.sink_window(64, 0)) == "first_window"
    own = kind(score_mod=lambda score, b, h, q_idx, kv_idx: score * 2.0)
    assert own.startswith("score") and own not in KINDS


def line_for(spec, kernel, wanted, **more):
    """An item of TABLE that chooses a candidate for the functions of a spec."""
    text = tuned.line(kernel, spec, HOPPER, wanted, "CARD, DATE, 1 TFLOP/s", "COMMAND")
    ((key, line),) = eval("{" + text + "}", {"Measured": tuned.Measured}).items()
    return {key: replace(line, **more)}


@pytest.mark.parametrize("variant", OF_ONE_LENGTH)
def test_functions_take_the_line_of_their_kind(monkeypatch, variant):
    spec = Spec(64, 64, **of_variant(variant))
    kernel, others = (
        forward.forward(spec),
        [Spec(64, 64, **of_variant(name)) for name in OF_ONE_LENGTH if name != variant],
    )
    usual = planner.plan(kernel, spec, HOPPER)
    before = [planner.plan(forward.forward(other), other, HOPPER) for other in others]
    wanted = next(v.candidate for v in usual.verdicts if not v.rejection and v.candidate.blocks[0][1] == 64)
    made = line_for(spec, kernel.name, wanted)
    assert list(made) == [("sm_90a", kernel.name, 64, 64, True, tuned.kind(spec), "")] and list(ill_fitting(made)) == []
    monkeypatch.setattr(tuned, "TABLE", tuned.TABLE | made)
    plan = planner.plan(kernel, spec, HOPPER)
    assert plan.candidate == wanted != usual.candidate
    assert plan.source == "measurement: CARD, DATE, 1 TFLOP/s: COMMAND"
    assert [planner.plan(forward.forward(other), other, HOPPER) for other in others] == before


def test_a_line_of_a_kind_may_be_for_a_length(monkeypatch):
    spec = Spec(64, 64, **of_variant("window"))
    kernel = forward.forward(spec)
    fitting = [v.candidate for v in planner.plan(kernel, spec, HOPPER).verdicts if not v.rejection]
    short = replace(spec, length="short")
    made = line_for(spec, kernel.name, fitting[1]) | line_for(short, kernel.name, fitting[2], limit=777)
    monkeypatch.setattr(tuned, "TABLE", tuned.TABLE | made)
    for seqlen_k, length in ((777, "short"), (778, "")):
        assert tuned.length(kernel.name, spec, HOPPER, seqlen_k) == length
    assert [planner.plan(kernel, one, HOPPER).candidate for one in (spec, short)] == fitting[1:3]
    assert "calls of up to 777 keys take a tile of" in planner.plan(kernel, spec, HOPPER).explain()
    assert tuned.length(kernel.name, Spec(64, 64, **of_variant("softcap")), HOPPER, 512) == ""


def test_functions_without_a_line_take_that_without_functions():
    for variant in ("softcap", "window"):
        spec = Spec(128, 128, **of_variant(variant))
        line = tuned.TABLE["sm_90a", "attention_forward", 128, 128, True, "", ""]
        plan = planner.plan(forward.forward(spec), spec, HOPPER)
        if not tuned.has_own("attention_forward", spec, HOPPER):
            assert plan.source == f"measurement: {line.note}, without the mask and score functions"
            assert line.matches(plan.candidate)
