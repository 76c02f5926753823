"""The catalog: what generated/ holds, and which kernels are compiled once for several specs."""

import dataclasses

import pytest

from flashgen import catalog
from flashgen.catalog import Kernels
from flashgen.ir.dtype import BF16, F16
from flashgen.spec import Spec


def test_the_catalog_covers_what_a_reader_looks_for():
    specs = set(catalog.SPECS)
    assert len(specs) == len(catalog.SPECS), "a spec is listed twice"
    assert {Spec(d, d, BF16, causal) for d in (64, 128, 256) for causal in (False, True)} <= specs
    assert {spec.head_dim for spec in specs if spec.dtype is F16} >= {64, 128}
    assert any(spec.head_dim % 16 for spec in specs), "none is padded"
    assert any(spec.head_dim_v != spec.head_dim for spec in specs)
    assert any(spec.deterministic for spec in specs)
    assert [arch.name for arch in catalog.COMPILED] == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120"]


def test_the_files_of_a_spec_are_each_kernel_at_each_stage():
    texts = catalog.files(Spec(64, 64, BF16, causal=True))
    kernels = ("attention_forward", "attention_delta", "attention_backward", "attention_convert_dq")
    own = ("attention_forward", "attention_backward")  # of sm_90a, whose others are portable
    names = [f"sm80/d64_bf16_causal/{name}" for name in kernels] + [f"sm90/d64_bf16_causal/{name}" for name in own]
    assert set(texts) == {f"{name}.{end}" for name in names for end in ("cu", "ir", "plan")}
    assert "(TILE)" in texts["sm80/d64_bf16_causal/attention_forward.ir"]
    assert "(MACHINE)" in texts["sm80/d64_bf16_causal/attention_forward.ir"]
    assert all(text.endswith("\n") and not text.endswith("\n\n") for text in texts.values())


@pytest.fixture
def one_chip(monkeypatch):
    monkeypatch.setattr(catalog, "COMPILED", (catalog.SHOWN,))


def test_a_kernel_that_specs_share_is_compiled_once(one_chip):
    spec = Spec(64, 64, BF16, causal=True)
    kernels = Kernels()
    kernels.add(spec)
    alone = len(kernels.entries)
    kernels.add(dataclasses.replace(spec, deterministic=True))
    served = {entry.stages.tile.name: len(entry.specs) for entry in kernels.entries if len(entry.specs) > 1}
    assert alone == 4
    assert served["attention_forward"] == 2, "the forward does not depend on how the backward adds"
    assert "attention_backward" not in served


def test_comments_do_not_make_a_kernel_another_one():
    assert catalog.code("int a;  // of d64\n// note\n") == catalog.code("int a;\n\n")
    assert catalog.code("int a;\n") != catalog.code("int b;\n")
