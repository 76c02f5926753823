"""The kernels of all measured lines through the real NVRTC: many are of lengths that `make generate` leaves out."""

import pytest
from tuned_lines import stages_of

from flashgen.plan import tuned
from flashgen.plan.arch import ARCHES
from flashgen.runtime import compile

pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("key", tuned.TABLE, ids=lambda key: "-".join(map(str, key)))
def test_a_measured_line_compiles_without_spills(key):
    stages = stages_of(key, ARCHES[key[0]])
    assert stages.plan.source.startswith(f"measurement: {tuned.TABLE[key].note}")
    report = compile.nvrtc(stages.source, stages.plan.arch.target).report
    assert (report.spill_stores, report.spill_loads) == (0, 0)
