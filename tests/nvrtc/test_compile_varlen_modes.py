"""Kernels for packed sequences with sinks and dropout through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced
from test_compile_varlen import check

from flashgen.ir.dtype import BF16, F16, F32
from flashgen.spec import Spec

pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("head_dim", "causal", "used"), [(64, True, False), (128, True, True), (128, False, False)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dim, causal, used):
    check(Spec(head_dim, head_dim, BF16, causal, varlen=True, used=used, sinks=F32, dropout=True), arch)


@pytest.mark.parametrize(("mask", "score"), [("both sides", None), (None, "alibi")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nor_with_functions(arch, mask, score):
    for more in ({"sinks": F32}, {"dropout": True}):
        check(Spec(128, 128, F16, varlen=True, **more, **traced(True, mask, score)), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nor_of_wide_heads(arch):
    check(Spec(256, 256, BF16, True, varlen=True, sinks=F32, dropout=True), arch)
