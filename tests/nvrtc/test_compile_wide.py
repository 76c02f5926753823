"""Forwards of head dims over 256 through the real NVRTC: no spills, no serialized wgmma."""

import pytest

from flashgen import build, masks, scores, variants
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")
DIMS = [(576, 512), (512, 512), (264, 264), (512, 256), (128, 512)]
OPTIONS = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {}),
    "window": ({"window": (1024, 0)}, {}),
    "softcap": ({"causal": True, "softcap": 50.0}, {}),
    "alibi": ({"causal": True, "score_mod": scores.alibi}, {}),
    "documents": ({"causal": True, "mask_mod": masks.document}, {"listed": True}),
    "sinks": ({"causal": True}, {"sinks": F32}),
    "dropout": ({"causal": True}, {"dropout": True}),
    "sequences": ({"causal": True}, {"varlen": True}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


def compiles(spec, arch):
    """A serialized wgmma is a CompileError."""
    stages = build.forward(spec, ARCHES[arch])[0]
    assert stages.plan.arch == ARCHES[arch]
    report = compile.nvrtc(stages.source, arch).report
    assert (report.spill_stores, report.spill_loads) == (0, 0)
    return stages


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mla_with_every_kind_of_function(arch, name):
    options, more = OPTIONS[name]
    causal, mask, score = variants.functions(**{"causal": False} | options)
    for shared in (False, True):
        compiles(Spec(576, 512, BF16, causal, mask=mask, score=score, **more, shared_kv=shared), arch)


@pytest.mark.parametrize("dims", DIMS[1:], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_other_wide_heads(arch, dims):
    for causal in (False, True):
        compiles(Spec(*dims, F16, causal=causal), arch)


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_90", "sm_120"])
def test_chips_with_less_memory(arch):
    compiles(Spec(576, 512, BF16, causal=True), arch)
    compiles(Spec(576, 512, BF16, causal=True, shared_kv=True), arch)


@pytest.mark.parametrize("packed", [2, 16, 64])
def test_query_heads_of_one_key_head_share_a_tile(packed):
    for shared in (False, True):
        compiles(Spec(576, 512, BF16, causal=True, packed=packed, shared_kv=shared), "sm_90a")


def test_rows_that_are_not_aligned():
    compiles(Spec(576, 512, BF16, causal=True, aligned=False), "sm_80")


def test_the_tile_of_the_keys_is_read_twice():
    """K-major for the scores, and each warpgroup its panels of columns for O."""
    text = compiles(Spec(576, 512, BF16, causal=True, shared_kv=True), "sm_90a").source.text
    assert "using OAcc = SameRows<BLOCK_Q, HEAD_DIM_V, 2>;" in text
    assert "using S = SameRows<BLOCK_Q, BLOCK_KV, 1>;" in text
    assert "+ warpgroup * 4 * KTile::PANEL_STEP" in text and "v_tile" not in text.split("struct Args")[1]
