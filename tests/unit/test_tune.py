"""The tuner without a GPU: real candidates, a made-up clock, and the lines that it prints for plan/tuned.py."""

import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flashgen.plan import tuned
from flashgen.plan.arch import parse_arch
from flashgen.runtime.program import Program

torch = pytest.importorskip("torch")
from flashgen.bench import tune  # noqa: E402  (imports torch)

ARCH = parse_arch("sm_90")
LINE = re.compile(r"for TABLE in flashgen/plan/tuned\.py:\n((?:    .*\n)+)")


class MadeUp:
    """Clock, heater and harness in one. The candidate `best` is fastest of those that work; faster ones fail."""

    best = 2

    def __init__(self, *arguments, rounds=5):
        self.rounds, self.peers = rounds, []

    def settle(self):
        return 0.0, 700.0

    def rate(self):
        return 700.0

    def measure(self, cell, peers):
        self.peers = MadeUp.peers = list(peers)
        records = {peer.name: {"rounds_ms": [2.0 + at, 1.0 + at, 3.0]} for at, peer in enumerate(self.peers)}
        names = list(records)
        records[names[self.best]] = {"rounds_ms": [1.0, 0.5, 0.9]}
        records[names[0]] |= {"rounds_ms": [0.1], "failure": "wrong"}
        records[names[1]] = {"failure": "out of memory"}
        return {"results": records}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    report = SimpleNamespace(registers=40, spill_stores=0, spill_loads=0, seconds=1.0)
    monkeypatch.setattr(Program, "cubin", SimpleNamespace(report=report))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Made Up 9000 Ti")
    for name in ("CudaClock", "Heater", "Harness"):
        monkeypatch.setattr(tune, name, MadeUp)
    monkeypatch.setattr(tune, "require_gpu", lambda: None)
    monkeypatch.setattr(tune, "compile_many", lambda work: None)
    monkeypatch.setattr(tune, "current_arch", lambda: ARCH)
    monkeypatch.setattr(tune, "choose", lambda names: ([], {}))


@pytest.mark.parametrize(("direction", "kernel"), [("fwd", "attention_forward"), ("bwd", "attention_backward")])
def test_the_winner_of_each_cell_is_printed_as_a_line(direction, kernel):
    chosen = ["--direction", direction, "--head-dim", "64", "--seqlen", "1024", "--limit", "4"]
    said = CliRunner().invoke(tune.command, chosen, catch_exceptions=False).stdout
    lines = LINE.findall(said)
    table = {}
    for line in lines:
        table |= eval("{" + line + "}", {"Measured": tuned.Measured})
    assert len(lines) == 2 and list(table) == [("sm_90", kernel, 64, 64, causal) for causal in (False, True)]
    measured = table["sm_90", kernel, 64, 64, True]
    assert [measured.matches(peer.plan.candidate) for peer in MadeUp.peers] == [False, False, True, False]
    command = (
        f"python -m flashgen tune --direction {direction} --head-dim 64 --causal --seqlen 1024 --limit 4 --rounds 5"
    )
    assert re.fullmatch(r"NVIDIA Made Up 9000 Ti, \d{4}-\d\d-\d\d, \d+ TFLOP/s: (.*)", measured.note)[1] == command
    assert tune.command.make_context("tune", command.split()[4:]).params["limit"] == 4


def test_where_no_candidate_works_there_is_no_line(monkeypatch):
    def broken(self, cell, peers):
        return {"results": {peer.name: {"failure": "wrong"} for peer in peers}}

    monkeypatch.setattr(MadeUp, "measure", broken)
    result = CliRunner().invoke(tune.command, ["--head-dim", "64", "--causal", "--limit", "2"], catch_exceptions=False)
    assert result.exit_code == 0 and "wrong" in result.stdout and not LINE.search(result.stdout)
