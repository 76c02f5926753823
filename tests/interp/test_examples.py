"""The examples of masks on the CPU interpreter, forward and backward, against dense float64; and as scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import support  # noqa: E402

import flashgen  # noqa: E402
from flashgen.cli.options import options_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [path for path in sorted((ROOT / "examples" / "masks").glob("*.py")) if path.stem != "compare"]


@pytest.mark.parametrize("lengths", [(56, 64), (70, 45)], ids=str)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_dense_attention(path, lengths):
    kernel = flashgen.compile(16, target="interpret", **{"causal": False} | options_of(path))
    arrays = support.random_inputs(1, *lengths, 4, 2, 16, dtype=torch.bfloat16, device="cpu")
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    found = support.failures(lambda q, k, v: kernel(q, k, v, return_lse=True), *arrays, **functions)
    assert not found, "\n".join(found)


def test_an_example_is_a_script():
    path = ROOT / "examples" / "masks" / "sliding_window.py"
    surroundings = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=surroundings)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("d64_bf16_causal_window15_0 on the ") and len(run.stdout.splitlines()) == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_a_few_lines_with_a_docstring(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""') and len(text.splitlines()) <= 25
    assert text.endswith("    from compare import with_dense\n\n    with_dense(options)\n")
