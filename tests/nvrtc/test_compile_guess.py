"""Hopper's forward without a guess of the maximum, as scores that rise with the keys have it: no spills."""

import pytest

from flashgen import build, scores, variants
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan import sm90
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile
from flashgen.spec import Spec

pytest.importorskip("cupy")
ARCH = ARCHES["sm_90a"]
OPTIONS = {
    "alibi": {"score_mod": scores.alibi},
    "slopes": {"score_mod": scores.slopes, "score_dtypes": (F32,)},
    "capped": {"score_mod": scores.alibi, "softcap": 50.0},
    "near": {"score_mod": scores.alibi, "window": (1024, 0)},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (64, F16), (128, F16)], ids=str)
def test_the_choice_does_not_spill(name, causal, head_dim, dtype):
    causal, mask, score = variants.functions(causal, **OPTIONS[name])
    spec = Spec(head_dim, head_dim, dtype, causal=causal, mask=mask, score=score)
    made = build.forward(spec, ARCH)[0]
    none_fits = (name, causal, head_dim) == ("capped", False, 256)  # without a guess: then there is one
    measured = (name, causal) == ("alibi", True) and head_dim < 256  # from the last block of keys, with a guess
    assert made.plan.arch == ARCH and made.plan.has(sm90.GUESS) == (none_fits or measured)
    report = compile.nvrtc(made.source, ARCH.target).report
    assert (report.spill_stores, report.spill_loads) == (0, 0), made.plan.candidate
