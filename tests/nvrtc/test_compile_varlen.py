"""Kernels for packed sequences through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import BF16, F16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")


def check(spec, arch, *made):
    for stages in made or build.everything(spec, ARCHES[arch]).values():
        report = compile.nvrtc(stages.source, stages.plan.arch.target).report
        assert (report.spill_stores, report.spill_loads) == (0, 0), (str(spec), stages.tile.name)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dims):
    """But for 12 bytes of the wide deterministic backward on sm_80."""
    for causal, used, deterministic in ((True, False, False), (False, True, max(head_dims) < 256)):
        check(Spec(*head_dims, BF16, causal, deterministic, varlen=True, used=used), arch)


@pytest.mark.parametrize(("mask", "score"), [("both sides", "softcap"), (None, "alibi"), ("document", None)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nor_with_functions(arch, mask, score):
    check(Spec(128, 128, F16, varlen=True, **traced(True, mask, score)), arch)


def test_rows_that_are_not_aligned():
    check(Spec(64, 64, BF16, True, aligned=False, varlen=True), "sm_80")


def test_heads_that_share_a_tile():
    spec = Spec(128, 128, BF16, True, packed=8, varlen=True)
    check(spec, "sm_90a", *build.forward(spec, ARCHES["sm_90a"]))
