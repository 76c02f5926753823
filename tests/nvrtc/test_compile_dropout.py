"""Kernels with dropout through the real NVRTC: no spills, no serialized wgmma; one evaluation of Philox for four."""

import re
import shutil

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile, sass
from flashgen.spec import Spec

pytest.importorskip("cupy")
CASES = [
    (64, BF16, {"causal": True}),
    (64, BF16, {"causal": False}),
    (128, BF16, {"causal": True}),
    (128, F16, {"causal": False}),
    (256, BF16, {"causal": True}),
    (128, BF16, {"causal": True, "window": (1024, 0)}),
    (128, BF16, {"causal": True, "score": "alibi"}),
    (64, BF16, {"causal": True, "softcap": 20.0}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


def drawing(spec, arch):
    """The kernels that make random numbers, each with its cubin. A serialized wgmma is a CompileError."""
    for stages in build.everything(spec, ARCHES[arch]).values():
        if stages.tile.name not in ("attention_delta", "attention_convert_dq"):
            yield stages, compile.nvrtc(stages.source, stages.plan.arch.target)


@pytest.mark.parametrize(("head_dim", "dtype", "options"), CASES, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dim, dtype, options):
    for stages, cubin in drawing(Spec(head_dim, head_dim, dtype, dropout=True, **traced(**options)), arch):
        report = cubin.report
        assert (report.spill_stores, report.spill_loads) == (0, 0), stages.tile.name


@pytest.mark.parametrize("options", [{}, {"mask": "document"}, {"window": (1024, 0)}, {"score": "alibi"}], ids=str)
@pytest.mark.parametrize("varlen", [False, True])
def test_narrow_values_leave_no_room_for_more_queries(varlen, options):
    spec = Spec(128, 64, dropout=True, varlen=varlen, **traced(True, **options))
    report = compile.nvrtc(build.backward(spec, ARCHES["sm_90a"])[1].source, "sm_90a").report
    assert (report.spill_stores, report.spill_loads) == (0, 0)


def test_heads_that_share_a_tile():
    """No call chooses it, but the kernel is right: element by element."""
    spec = Spec(128, 128, causal=True, packed=8, dropout=True, sinks=F32)
    made = build.forward(spec, ARCHES["sm_90a"])[0]
    assert made.plan.packed == 8 and "random_word(" in made.source.text
    compile.nvrtc(made.source, "sm_90a")


@pytest.mark.skipif(not any(map(shutil.which, sass.TOOLS)), reason="no disassembler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_four_elements_share_an_evaluation(arch):
    """An evaluation is 20 products of 32 by 32 bits, some of which a row or a column has in common."""
    tool = next(filter(None, map(shutil.which, sass.TOOLS)))
    for stages, cubin in drawing(Spec(128, 128, causal=True, dropout=True), arch):
        products = len(re.findall(r"IMAD\.WIDE\.U32", sass.disassemble(tool, cubin.image)))
        plan = stages.plan
        elements = plan.sizes["block_q"] * plan.sizes["block_kv"] // (32 * plan.computing_warps)
        rounds = 2 if stages.tile.name == "attention_forward" and plan.arch.family == "sm90" else 1  # one step apart
        assert products <= rounds * (6 * elements), (stages.tile.name, products, elements)
