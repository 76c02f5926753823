"""The examples of masks on the GPU, forward and backward, against dense float64 attention."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import attend, report  # noqa: E402

import flashgen  # noqa: E402
from flashgen.cli.options import options_of  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "masks"
EXAMPLES = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "compare"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_dense_attention(path):
    kernel = flashgen.compile(64, **{"causal": False} | options_of(path))
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    found = []
    for seed, lengths in enumerate(((113, 203), (512, 256), (700, 1100))):
        arrays = support.random_inputs(2, *lengths, 4, 2, 64, dtype=torch.bfloat16, device="cuda", seed=seed)
        found += [f"{lengths} {sentence}" for sentence in support.failures(attend(kernel), *arrays, **functions)]
    report(found)
