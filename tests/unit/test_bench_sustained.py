"""Each kernel by itself, at the clock that its own power allows."""

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402
from test_bench import FakeHeater, FakePeer  # noqa: E402
from test_bench_report import canned  # noqa: E402

from flashgen.bench import grid, measure, report, run, variants  # noqa: E402
from flashgen.bench.grid import Cell  # noqa: E402


class Throttled:
    """A card that slows down: launches take 1 ms, and 2 once it has run for 100 ms without another kernel."""

    def __init__(self):
        self.ran, self.last, self.counts = 0.0, None, []

    def time(self, launch, count):
        self.ran = 0.0 if launch is not self.last else self.ran
        self.last = launch
        milliseconds = 2.0 if self.ran >= 100 else 1.0
        self.ran += count * milliseconds
        self.counts.append(count)
        return milliseconds, launch()

    def synchronize(self):
        pass


def timed(sustained_s, monkeypatch):
    for name in ("TOKENS", "CHANNELS"):
        monkeypatch.setattr(grid, name, 64)
    variants.modification.cache_clear()
    clock = Throttled()
    harness = measure.Harness(clock, FakeHeater(), "cpu", 5, sustained_s=sustained_s)
    found = harness.measure(Cell("fwd", 16, True, 32), [FakePeer("flashgen"), FakePeer("other")])["results"]
    return clock, found


def test_the_second_half_counts(monkeypatch):
    clock, found = timed(1.0, monkeypatch)
    assert [result["rounds_ms"] for result in found.values()] == [[2.0], [2.0]]
    assert clock.counts.count(500) == 4  # half a second of 1 ms each to settle, and as many again


def test_rounds_are_too_short_for_that(monkeypatch):
    _, found = timed(0.0, monkeypatch)
    assert [result["rounds_ms"] for result in found.values()] == [[1.0] * 5] * 2


def test_the_results_say_so():
    made = canned()
    assert "shuffled rounds a cell" in " ".join(report.sentences(made))
    assert "Each by itself for 1.5 s a cell" in " ".join(report.sentences(made | {"sustained_s": 1.5}))


def test_the_command_passes_it_on(monkeypatch):
    given = {}
    monkeypatch.setattr(run, "run", lambda *args, **more: given.update(more) or {"cells": []})
    for words, seconds in ((["--sustained", "2"], 2.0), ([], 0.0)):
        assert CliRunner().invoke(run.command, words, catch_exceptions=False).exit_code == 0
        assert given["sustained_s"] == seconds
    refused = CliRunner().invoke(run.command, ["--sustained", "0"])
    assert refused.exit_code == 2 and "0.1" in refused.output
