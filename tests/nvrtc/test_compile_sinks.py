"""Kernels with attention sinks through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from functions import traced

from flashgen import build
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")
CASES = [
    (64, BF16, {"causal": True}),
    (128, BF16, {"causal": True}),
    (128, F16, {"causal": False}),
    (256, BF16, {"causal": True}),
    (128, BF16, {"causal": True, "window": (1024, 0), "softcap": 20.0}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


def compiled(every, but=()):
    """Compiles what is not left out. A serialized wgmma is a CompileError."""
    for stages in every:
        if stages.tile.name not in but:
            report = compile.nvrtc(stages.source, stages.plan.arch.target).report
            assert (report.spill_stores, report.spill_loads) == (0, 0), stages.tile.name


@pytest.mark.parametrize(("head_dim", "dtype", "options"), CASES, ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_kernel_spills(arch, head_dim, dtype, options):
    """Of the backward only what sinks add: the rest has no sink in it."""
    spec = Spec(head_dim, head_dim, dtype, sinks=F32, **traced(**options))
    same = ("attention_delta", "attention_backward", "attention_backward_dq", "attention_convert_dq")
    compiled(build.everything(spec, ARCHES[arch]).values(), same)


@pytest.mark.parametrize("sinks", [F32, BF16])
def test_heads_that_share_a_tile(sinks):
    made = build.forward(Spec(128, 128, causal=True, packed=8, sinks=sinks), ARCHES["sm_90a"])
    assert made[0].plan.packed == 8
    compiled(made)
