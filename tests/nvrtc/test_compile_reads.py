"""The kernel that looks for reads outside of an array through the real NVRTC."""

import pytest
from functions import traced

from flashgen import build
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("mask", "score"), [("document", "bias"), ("visible", "buckets"), ("lengths", "relative")])
@pytest.mark.parametrize("more", [{}, {"used": True}, {"varlen": True, "used": True}], ids=str)
def test_it_compiles_without_spills(more, mask, score, arch):
    spec = Spec(128, 128, **more, **traced(True, mask, score))
    for item in spec.arrays:
        stages = build.reads(spec, item, ARCHES[arch], 64)
        report = compile.nvrtc(stages.source, stages.plan.arch.target).report
        assert (report.spill_stores, report.spill_loads) == (0, 0), item.name
