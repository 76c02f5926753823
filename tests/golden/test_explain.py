"""explain moves sensibly with the shared memory of the chip."""

import itertools
import re

import pytest

from flashgen import build
from flashgen.plan.arch import ARCHES, with_shared_memory
from flashgen.spec import Spec

KIB = 1024
SIZES = (48, 64, 96, 160)
SPEC = Spec(128, 128, causal=True)


def plan_with(kib):
    return build.forward(SPEC, with_shared_memory(ARCHES["sm_80"], kib * KIB))[0].plan


@pytest.fixture(scope="module")
def plans():
    return {kib: plan_with(kib) for kib in SIZES}


def rejections(plan):
    """The candidates that shared memory rules out, and their sentences."""
    return {str(v.candidate): v.rejection for v in plan.verdicts if "shared memory" in v.rejection}


def test_every_choice_fits(plans):
    for kib, plan in plans.items():
        assert 0 < plan.shared_bytes <= kib * KIB


def test_less_memory_never_takes_more(plans):
    used = [plans[kib].shared_bytes for kib in SIZES]
    assert used == sorted(used)
    assert used[0] < used[-1], "the choice does not move at all"


def test_less_memory_rejects_more_and_says_the_limit_in_kib(plans):
    for small, large in itertools.pairwise(SIZES):
        assert rejections(plans[large]).keys() <= rejections(plans[small]).keys()
    tight = rejections(plans[SIZES[0]])
    assert len(tight) > len(rejections(plans[SIZES[-1]]))
    for candidate, sentence in tight.items():
        needed = re.search(r"([\d.]+) KiB", sentence)
        assert needed and float(needed[1]) > SIZES[0], f"{candidate}: {sentence}"
        assert f"{SIZES[0]} KiB" in sentence


def test_the_text_holds_the_choice_the_ranking_and_the_rejections(plans):
    plan = plans[64]
    text = plan.explain()
    assert text.startswith(plan.text().rstrip())
    for verdict in plan.verdicts:
        assert str(verdict.candidate) in text and verdict.rejection in text
    costs = [verdict.cost for verdict in plan.verdicts if not verdict.rejection]
    assert costs == sorted(costs)


def test_a_mask_without_intervals_is_named():
    import flashgen
    from flashgen import masks

    known = flashgen.compile(64, True, arch="sm_80", window=(100, None), mask_mod=masks.chunked(64))
    assert "no interval is known" not in known.explain()
    unknown = flashgen.compile(64, True, arch="sm_80", mask_mod=masks.dilated(3))
    assert "every tile, as no interval is known: floor_mod(" in unknown.explain()
