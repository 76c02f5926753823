"""Kernels of float32 through the real NVRTC: no spills, and the matrix instructions that they are made of."""

import re
import shutil

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import F32, FP32, TF32
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile, sass
from flashgen.spec import Spec

pytest.importorskip("cupy")
DTYPES = pytest.mark.parametrize("dtype", [FP32, TF32], ids=lambda dtype: dtype.cuda)
VARIANTS = [
    {"window": (100, 0)},
    {"softcap": 30.0},
    {"score": "alibi"},
    {"mask": "document", "score": "bias"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


def check(spec, arch, skipped=("attention_delta", "attention_convert_dq")):
    """No kernel of the spec spills, and sm_90a takes those of sm_90."""
    for stages in build.everything(spec, ARCHES[arch]).values():
        assert stages.plan.arch.name == arch.removesuffix("a")
        if stages.tile.name not in skipped:
            report = compile.nvrtc(stages.source, stages.plan.arch.target).report
            assert (report.spill_stores, report.spill_loads) == (0, 0), stages.tile.name


@DTYPES
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dim, dtype):
    check(Spec(head_dim, head_dim, dtype, causal=True), arch)


@DTYPES
@pytest.mark.parametrize("arch", ["sm_86", "sm_120"])
def test_chips_of_little_shared_memory(arch, dtype):
    check(Spec(128, 128, dtype, causal=True), arch, skipped=())
    forward = build.forward(Spec(256, 256, dtype), ARCHES[arch])[0]
    report = compile.nvrtc(forward.source, arch).report
    assert (report.spill_stores, report.spill_loads) == (0, 0)


@DTYPES
@pytest.mark.parametrize(
    "spec",
    [
        {"deterministic": True},
        {"varlen": True},
        {"aligned": False},
        {"head_dim": 40, "head_dim_v": 24},
        {"head_dim": 192},
    ],
    ids=str,
)
def test_other_specs(spec, dtype):
    check(Spec(**{"head_dim": 128, "head_dim_v": 128, "causal": True} | spec, dtype=dtype), "sm_80", skipped=())


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_functions(arch, options):
    check(Spec(64, 64, FP32, **traced(causal=True, **options)), arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_dropout_and_sinks(arch):
    check(Spec(64, 64, FP32, causal=True, dropout=True, sinks=F32), arch, skipped=())


@pytest.mark.skipif(not any(map(shutil.which, sass.TOOLS)), reason="no disassembler")
def test_three_products_are_three_instructions():
    tool = next(filter(None, map(shutil.which, sass.TOOLS)))
    counts = {}
    for dtype in (FP32, TF32):
        stages = build.forward(Spec(64, 64, dtype), ARCHES["sm_80"])[0]
        text = sass.disassemble(tool, compile.nvrtc(stages.source, "sm_80").image)
        sizes = stages.plan.sizes
        of_values = sizes["block_q"] // stages.plan.warps // 16 * sizes["block_kv"] // 8 * sizes["head_dim_v"] // 8
        counts[dtype] = len(re.findall(r"HMMA\.1688\.F32\.TF32", text))
        assert counts[dtype] > (3 if dtype == FP32 else 1) * of_values, "all of P V is unrolled, and of Q K^T a part"
        assert "HMMA.16816" not in text
