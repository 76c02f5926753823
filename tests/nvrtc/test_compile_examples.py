"""The examples of masks through the real NVRTC: no spills where the planner counts what their functions take."""

from pathlib import Path

import pytest

import flashgen
from flashgen import build
from flashgen.cli.options import options_of
from flashgen.runtime import compile

pytest.importorskip("cupy")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "masks"
EXAMPLES = [path for path in sorted(FOLDER.glob("*.py")) if path.stem != "compare"]
COPYING = ("attention_delta", "attention_convert_dq")  # evaluate no functions


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        yield


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_90a", 64), ("sm_90a", 128), ("sm_80", 128)])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_does_not_spill(path, arch, head_dim):
    kernel = flashgen.compile(head_dim, arch=arch, **{"causal": False} | options_of(path))
    for name, stages in build.everything(kernel.spec, kernel.arch).items():
        if name not in COPYING:
            report = compile.nvrtc(stages.source, stages.plan.arch.target).report
            assert (report.spill_stores, report.spill_loads) == (0, 0), (name, str(stages.plan.candidate))
