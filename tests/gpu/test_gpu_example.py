"""The example trains alike with flashgen's attention, torch's and cuDNN's."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_gpt.py"
STEPS = 10
SIZES = "--batch 4 --context 1024 --layers 2 --heads 4 --head-dim 128"
OPTIONS = f"--device cuda --steps {STEPS} --lr 2e-4 --sample 20 {SIZES}".split()


@pytest.fixture(scope="module")
def train():
    """Options -> the result of a run."""
    spec = importlib.util.spec_from_file_location("char_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *options: module.main([*OPTIONS, *options])


@pytest.mark.parametrize("other", ["sdpa", "cudnn"])
def test_losses_agree(train, other):
    """The first loss but for rounding; then each step may make more of the difference."""
    if other == "cudnn" and not torch.backends.cudnn.is_available():
        pytest.skip("this torch has no cuDNN")
    ours, theirs = train("--attention", "flashgen"), train("--attention", other)
    assert len(ours["losses"]) == len(theirs["losses"]) == STEPS
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], abs=2e-3)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=0.05)
    assert ours["losses"][-1] < ours["losses"][0] - 0.3
