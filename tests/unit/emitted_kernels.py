"""Kernels of three specs on three chips, as the emitter prints them."""

import pytest

from flashgen import build
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

SPECS = [Spec(64, 64, causal=True), Spec(40, 72, deterministic=True, aligned=False), Spec(128, 128)]
ARCHES = ["sm_90", "sm_80", "sm_120"]
ALL = {
    f"{spec}-{name}": (spec, stages)
    for spec, arch in zip(SPECS, ARCHES, strict=True)
    for name, stages in build.everything(spec, parse_arch(arch)).items()
}
SPEC, FORWARD = ALL["d64_bf16_causal-attention_forward"]
BACKWARD = ALL["d64_bf16_causal-attention_backward"][1]
each = pytest.mark.parametrize(("spec", "stages"), ALL.values(), ids=ALL)
