"""Kernels that walk lists of blocks, through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import BF16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("mask", ["document", "lengths"])
def test_lists_do_not_spill(mask, arch, head_dim, tmp_path, monkeypatch):
    """A serialized wgmma is a CompileError."""
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    for causal in (True, False):
        spec = Spec(head_dim, head_dim, BF16, listed=True, **traced(causal, mask))
        for stages in build.everything(spec, ARCHES[arch]).values():
            if stages.tile.name in ("attention_delta", "attention_convert_dq"):
                continue
            assert stages.plan.arch.name == arch, f"{stages.tile.name} is taken from another family"
            report = compile.nvrtc(stages.source, stages.plan.arch.target).report
            assert (report.spill_stores, report.spill_loads) == (0, 0), (stages.tile.name, causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_where_heads_share_a_tile(head_dim, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    for causal in (True, False):
        spec = Spec(head_dim, head_dim, packed=8, listed=True, **traced(causal, "document"))
        report = compile.nvrtc(build.forward(spec, ARCHES["sm_90a"])[0].source, "sm_90a").report
        assert (report.spill_stores, report.spill_loads) == (0, 0), causal


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("mask", ["document", "visible", "strided", None])
def test_the_kernel_that_counts(mask, block_size, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    for arch in ("sm_80", "sm_90a"):
        stages = build.block_counts(Spec(**traced(True, mask)), ARCHES[arch], block_size)
        report = compile.nvrtc(stages.source, stages.plan.arch.target).report
        assert (report.spill_stores, report.spill_loads) == (0, 0), arch
