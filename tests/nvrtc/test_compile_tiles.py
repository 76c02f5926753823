"""Kernels that copy tiles of what score functions read, through the real NVRTC: no spills, no serialized wgmma."""

import pytest
from tile_scores import score

from flashgen import build, trace, variants
from flashgen.ir.dtype import BF16, F16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.scores import bias
from flashgen.spec import Spec

pytest.importorskip("cupy")
HOPPER = ARCHES["sm_90a"]


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


def spills(spec):
    """The kernels of a spec that copy such tiles; of each, the bytes that are spilled. A serialized wgmma raises."""
    made = [item for item in build.everything(spec, HOPPER).values() if "aux_" in item.machine_text]
    found = {}
    for stages in made:
        report = compile.nvrtc(stages.source, "sm_90a").report
        found[stages.tile.name] = report.spill_stores + report.spill_loads
    return found


def spec_of(head_dim, causal=False, dtype=BF16, **more):
    return Spec(head_dim, head_dim, causal=causal, score=trace.score(bias, (dtype,)), tiled=True, **more)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_a_bias_does_not_spill(head_dim, causal, deterministic):
    found = spills(spec_of(head_dim, causal, deterministic=deterministic))
    apart = {"attention_backward_dq"} if deterministic or head_dim > 128 else set()
    assert found == dict.fromkeys({"attention_forward", "attention_backward", *apart}, 0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["of_heads", "of_none", "two"])
def test_other_functions_do_not_spill(name, head_dim):
    found = spills(Spec(head_dim, head_dim, causal=True, score=score(name), tiled=True))
    assert found and not any(found.values()), found


@pytest.mark.parametrize("more", [{"dtype": F16}, {"sinks": BF16}, {"dropout": True}, {"listed": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_goes_with_a_bias_does_not_spill(head_dim, more):
    found = spills(spec_of(head_dim, True, **more))
    assert "attention_forward" in found and not any(found.values()), found


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"window": (256, 0)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_beside_other_functions_does_not_spill(head_dim, options):
    causal, mask, both = variants.functions(True, score_mod=bias, score_dtypes=(BF16,), **options)
    found = spills(Spec(head_dim, head_dim, causal=causal, mask=mask, score=both, tiled=True))
    assert "attention_forward" in found and not any(found.values()), found
