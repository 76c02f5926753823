"""What the benchmark makes of its measurements: means, table, sentences, files and plot, from canned results."""

from __future__ import annotations

import copy
import io

import pytest
from rich.console import Console

from flashgen.bench import plot, report


def canned():
    """Results of two cells a direction: flashgen at 300, fa2 at 320, cudnn at 600 and failing once."""
    cells = []
    for direction in ("fwd", "bwd"):
        for seqlen in (4096, 8192):
            rates = {"flashgen": 300.0, "fa2": 320.0, "cudnn": 600.0}
            entry = {n: {"tflops": r, "ms": 1.0, "spread": 0.02, "rounds_ms": [1.0] * 5} for n, r in rates.items()}
            cell = {"direction": direction, "head_dim": 128, "causal": True, "seqlen": seqlen, "batch": 2, "heads": 16}
            cells.append(cell | {"flops": 1, "results": entry})
    cells[0]["results"]["cudnn"] = {"failed": "RuntimeError: no [plan]"}
    cells[1]["results"]["fa2"]["spread"] = 0.3
    about = {"card": "Fake GPU", "multiprocessors": 132, "driver": "1", "cuda": "13.0", "torch": "2"}
    return {
        "preset": "spine",
        "date": "2026-01-01",
        "seed": 0,
        "rounds": 5,
        "environment": about,
        "cublas_tflops": {"cold": 790.0, "before": 700.0, "after": None},
        "peers": {n: {"title": n, "version": "1"} for n in ("flashgen", "fa2", "cudnn")}
        | {"fa3": {"unavailable": "fa3-fwd is not installed"}},
        "cells": cells,
        "host_us": {"d128 causal": {"flashgen": 21.4, "fa2": 30.0}},
        "summary": {},
    }


def shown(results):
    console = Console(file=io.StringIO(), width=140, color_system=None)
    report.show(results, console)
    return console.file.getvalue()


def test_summary_takes_geometric_means():
    means = report.summary(canned())
    assert means["bwd"] == pytest.approx({"best": 0.5, "fa2": 300 / 320, "cudnn": 0.5, "cells": 2})
    assert means["fwd"]["best"] == pytest.approx((300 / 320 * 0.5) ** 0.5)  # fa2 is the best where cudnn failed
    assert report.geometric_mean([]) is None


def test_table_and_sentences():
    text = shown(canned())
    assert "/ best" in text and "/ fa2" in text and "0.94" in text and "failed" in text
    assert "cuBLAS 8192-cubed bf16, TFLOP/s: 790 cold, 700 before, not measured after." in text
    assert "fa3: fa3-fwd is not installed." in text
    assert "Not timed: cudnn in fwd d128 causal 4096: RuntimeError: no [plan]" in text
    assert "Noise: fwd d128 causal 8192, fa2: the rounds lie 30% apart." in text
    assert "Host time of a forward call, d128 causal, us: flashgen 21, fa2 30." in text
    assert report.line(canned()["cells"][1]) == "fwd d128 causal 8192     flashgen 300  fa2 320  cudnn 600"


def test_table_without_flashgen_or_fa2():
    results = canned()
    for name in ("flashgen", "fa2"):
        results["peers"].pop(name)
        for cell in results["cells"]:
            cell["results"].pop(name)
    text = shown(results)
    assert "600" in text and "/ best" not in text
    assert "geometric mean" not in text


def test_json_round_trip(tmp_path):
    report.save(canned(), tmp_path / "deep" / "bench.json")
    assert report.load(tmp_path / "deep" / "bench.json") == canned()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["bench.json"]


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot.plot(canned(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    only = copy.deepcopy(canned())
    only["cells"] = only["cells"][:1]
    plot.plot(only, tmp_path / "one.png")
    assert plot.short(512) == "512" and plot.short(16384) == "16k"


def test_plot_labels_do_not_overlap():
    placed = plot.spread_out([100.0, 101.0, 102.0, 300.0], gap=10.0)
    assert placed == pytest.approx([91.0, 101.0, 111.0, 300.0])
    assert plot.spread_out([1.0, 50.0], gap=10.0) == [1.0, 50.0]
