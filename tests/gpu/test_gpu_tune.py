"""`flashgen tune --variant` on the GPU: every candidate that it compiles computes what the variant is defined as."""

import json

import pytest
from click.testing import CliRunner

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from flashgen.bench import tune  # noqa: E402
from flashgen.bench.variants import OF_ONE_LENGTH  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize(
    ("direction", "top", "names"), [("fwd", 4, OF_ONE_LENGTH), ("bwd", 1, ["window", "bias"])], ids=["fwd", "bwd"]
)
def test_candidates_of_variants_are_timed_and_right(tmp_path, direction, top, names):
    path = tmp_path / "tune.json"
    given = ["--direction", direction, "--head-dim", "64", "--seqlen", "1024", "--rounds", "3", "--top", str(top)]
    given += [word for name in names for word in ("--variant", name)]
    made = CliRunner().invoke(tune.command, [*given, "--output", str(path)], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    cells = json.loads(path.read_text())["cells"]
    assert {cell["variant"] for cell in cells} == set(names)
    for cell in cells:
        assert len(cell["results"]) >= top
        for name, record in cell["results"].items():
            assert "glance_ms" in record, f"{cell['variant']} {cell['kernel']} {name}: {record}"
        assert any("ms" in record for record in cell["results"].values())
    assert not any(word in made.output for word in ("Failed:", "Not timed:"))
