"""flashgen without torch, without CuPy and without a GPU: everything but launching."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # importing any of them now fails as if it were not installed
import numpy as np
import flashgen
from flashgen.interp import reference

kernel = flashgen.compile(64, True, dtype="bfloat16", arch="sm_90")
assert kernel.explain() and dict(kernel.ir) and dict(kernel.machine_ir) and dict(kernel.source)
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, n, 2, 16)).astype(np.float16) for n in (20, 30, 30))
o, lse = flashgen.compile(16, True, dtype="float16")(q, k, v, return_lse=True)
want, want_lse = reference.forward(q, k, v, causal=True)
assert type(o) is np.ndarray and np.abs(o - want).max() < 0.01 and np.abs(lse - want_lse).max() < 1e-3
assert np.array_equal(flashgen.attention(q, k, v, causal=True), o)
print("right")
"""


@pytest.mark.parametrize("absent", [("torch",), ("cupy",), ("torch", "cupy", "cuda")], ids=str)
def test_works_without(absent):
    command = [sys.executable, "-c", WITHOUT.format(absent=absent)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip() == "right", run.stderr[-2000:]


def test_the_root_package_exports_the_contract():
    import flashgen

    assert callable(flashgen.compile) and callable(flashgen.attention) and isinstance(flashgen.Spec, type)
