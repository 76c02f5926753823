"""Kernels whose mask and score functions read arrays, through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import READING_MASKS, READING_SCORES, traced

from flashgen import build, trace
from flashgen.ir.dtype import BF16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")


def reports(spec, arch):
    """What ptxas says of the kernels that evaluate functions."""
    for stages in build.everything(spec, ARCHES[arch]).values():
        if stages.tile.name not in ("attention_delta", "attention_convert_dq"):
            yield stages.tile.name, compile.nvrtc(stages.source, stages.plan.arch.target).report


@pytest.mark.parametrize("name", ["document", "bias", "slopes", "relative"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_functions_that_read_do_not_spill(arch, head_dim, name, tmp_path, monkeypatch):
    """A serialized wgmma is a CompileError."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    kind = "mask" if name in READING_MASKS else "score"
    for causal in (True, False):
        for kernel, report in reports(Spec(head_dim, head_dim, BF16, **traced(causal, **{kind: name})), arch):
            assert (report.spill_stores, report.spill_loads) == (0, 0), (kernel, causal)


@pytest.mark.parametrize("dtype", trace.DTYPES.values(), ids=str)
def test_every_type_compiles_where_heads_share_a_tile(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    score = trace.score(READING_SCORES["bias"], (dtype,))
    stages = build.forward(Spec(128, 128, causal=True, packed=8, score=score), ARCHES["sm_90a"])[0]
    assert stages.plan.packed == 8
    report = compile.nvrtc(stages.source, "sm_90a").report
    assert (report.spill_stores, report.spill_loads) == (0, 0)
