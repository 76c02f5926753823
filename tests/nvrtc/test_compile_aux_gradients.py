"""The kernels of gradients of arrays, through the real NVRTC: no spills, on the chips' portable kernels."""

from dataclasses import replace

import pytest
from functions import READING_SCORES

from flashgen import build, scores, variants
from flashgen.attention.backward_aux import Part
from flashgen.ir.dtype import BF16, F32
from flashgen.plan.arch import ARCHES
from flashgen.runtime import aux_gradients, compile
from flashgen.runtime.arguments import Problem
from flashgen.spec import Spec

pytest.importorskip("cupy")

SIZES = Problem(2, 4, 2, 21, 30, 0, 0, ())
WHOLE = (2, 4, 21, 30)


def parts_of(spec, shapes):
    """Of all arrays with a gradient, for their shapes by name."""
    for item in spec.arrays:
        if item.name in shapes:
            yield from aux_gradients.parts(spec, item, shapes[item.name], SIZES)


def spills(spec, arch, part):
    stages = build.backward_aux(spec, ARCHES[arch], part)
    report = compile.nvrtc(stages.source, stages.plan.arch.target).report
    return report.spill_stores, report.spill_loads


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_bias_and_slopes_do_not_spill(arch, head_dim):
    """Each nest, for a bias whose axes are whole or of one element, and slopes of heads and of batches."""
    _, _, score = variants.functions(True, bias=True, alibi=True)
    for causal in (True, False):
        spec = Spec(head_dim, head_dim, BF16, causal, score=score)
        seen = set()
        for ones in ((), (0,), (1,), (0, 1), (0, 1, 2)):
            shape = tuple(1 if axis in ones else size for axis, size in enumerate(WHOLE))
            for part in parts_of(spec, {"bias": shape, "alibi_slopes": (1, 4)}):
                seen.add(part.walk)
                assert spills(spec, arch, part) == (0, 0), (part, causal)
        assert seen == {"rows", "columns", "pairs"}


@pytest.mark.parametrize(
    ("function", "shape"),
    [(READING_SCORES["relative"], (4, 9)), (READING_SCORES["buckets"], (2, 4)), (scores.relative_bias(), (32, 4))],
    ids=["relative", "buckets", "t5"],
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_tables_do_not_spill(arch, head_dim, function, shape):
    for causal in (True, False):
        _, _, score = variants.functions(causal, score_mod=function)
        spec = Spec(head_dim, head_dim, BF16, causal, score=score)
        every = list(parts_of(spec, {"score_table": shape}))
        assert every
        for part in every:
            assert spills(spec, arch, part) == (0, 0), (part, causal)


@pytest.mark.parametrize("aligned", [True, False])
def test_sixteen_bit_gradients_and_rows_that_are_not_aligned(aligned):
    _, _, score = variants.functions(False, score_mod=scores.bias, score_dtypes=(BF16,))
    spec = Spec(64, 64, aligned=aligned, score=score)
    (part,) = parts_of(spec, {"score_biases": WHOLE})
    assert isinstance(part, Part) and part.dtype == BF16 != F32
    assert spills(spec, "sm_90a", part) == (0, 0)


@pytest.mark.parametrize("options", [{"dropout": True}, {"varlen": True, "used": True}], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_beside_dropout_and_packed_sequences(arch, options):
    """Each nest, of three arrays at once."""
    _, _, score = variants.functions(True, score_mod=READING_SCORES["relative"], bias=True, alibi=True)
    spec = Spec(64, 64, BF16, True, score=score, **options)
    for part in parts_of(spec, {"bias": (1, 1, 21, 30), "alibi_slopes": (2, 4), "score_table": (4, 9)}):
        assert spills(spec, arch, part) == (0, 0), part


@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"varlen": True}], ids=str)
@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 64), ("sm_90a", 128), ("sm_90a", 256)])
def test_deterministic_tables_do_not_spill(arch, head_dim, options):
    """The additions of integers, and the sums of magnitudes that say what these stand for."""
    _, _, score = variants.functions(True, score_mod=scores.relative_bias())
    spec = Spec(head_dim, head_dim, BF16, True, True, score=score, **options)
    (part,) = parts_of(spec, {"score_table": (32, 4)})
    assert part.ordered
    assert spills(spec, arch, part) == spills(spec, arch, replace(part, dtype=F32, magnitude=True)) == (0, 0)
