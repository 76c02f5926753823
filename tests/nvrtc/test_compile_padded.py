"""Kernels for `seqused_k` of padded batches through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced
from test_compile_varlen import check

from flashgen import build
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.spec import Spec

pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dims):
    for causal, deterministic in ((True, False), (False, max(head_dims) < 256)):
        check(Spec(*head_dims, BF16, causal, deterministic, used=True), arch)


@pytest.mark.parametrize(("mask", "score"), [("both sides", "softcap"), (None, "alibi"), ("document", None)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nor_with_functions(arch, mask, score):
    check(Spec(128, 128, F16, used=True, **traced(True, mask, score)), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nor_with_sinks_and_dropout(arch):
    check(Spec(128, 128, BF16, True, used=True, sinks=F32, dropout=True), arch)


def test_rows_that_are_not_aligned_and_heads_that_share_a_tile():
    check(Spec(64, 64, BF16, True, aligned=False, used=True), "sm_80")
    spec = Spec(128, 128, BF16, True, packed=8, used=True)
    check(spec, "sm_90a", *build.forward(spec, ARCHES["sm_90a"]))


def test_rows_of_a_load_are_counted_through_the_batches():
    """A tensor map has no dimension left for them."""
    forward = build.forward(Spec(128, 128, BF16, True, used=True), ARCHES["sm_90a"])[0]
    text = forward.source.text
    assert "tma_load_rows<KTile>" in text and "batch * args.k_batch_rows + kv_start" in text
    assert "tma_load<QTile>" in text and "tma_store" in text
