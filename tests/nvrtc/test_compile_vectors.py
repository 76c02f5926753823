"""Forwards that hold vectors of what functions read, through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import BF16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")


@pytest.mark.parametrize("score", [None, "softcap", "alibi"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("listed", [True, False])
def test_documents_do_not_spill(listed, head_dim, score, tmp_path, monkeypatch):
    """A serialized wgmma is a CompileError. With ALiBi there is no guess of the maximum."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    for causal in (True, False):
        spec = Spec(head_dim, head_dim, BF16, listed=listed, **traced(causal, "document", score))
        stages = build.forward(spec, ARCHES["sm_90a"])[0]
        assert "mask_ids_columns" in stages.source.text
        report = compile.nvrtc(stages.source, "sm_90a").report
        assert (report.spill_stores, report.spill_loads) == (0, 0), causal
