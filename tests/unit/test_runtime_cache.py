"""The disk cache: keys, damaged entries, directories that refuse, and how fast a warm hit is. No GPU, no CuPy."""

import dataclasses
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen.runtime import cache, compile

ROOT = Path(__file__).resolve().parents[2]
REPORT = compile.Report(32, 0, 0, 512, 0, seconds=0.5, cached=False, nvrtc_version="13.5.37", log="ptxas said\nthis")


def source(name="k", text='extern "C" __global__ void k() {}', headers=(("a.cuh", "int a;"),)):
    return SimpleNamespace(name=name, text=text, headers=headers)


BASE = {"source": source(), "arch": "sm_80", "options": ("-lineinfo",), "nvrtc_version": "13.5.37"}
CHANGES = {
    "name": {"source": source(name="j")},
    "text": {"source": source(text='extern "C" __global__ void k() { }')},
    "header name": {"source": source(headers=(("b.cuh", "int a;"),))},
    "header text": {"source": source(headers=(("a.cuh", "int b;"),))},
    "header order": {"source": source(headers=(("z.cuh", ""), ("a.cuh", "int a;")))},
    "headers cut elsewhere": {"source": source(headers=(("a.cuhi", "nt a;"),))},
    "no header": {"source": source(headers=())},
    "arch": {"arch": "sm_90a"},
    "option": {"options": ()},
    "options cut elsewhere": {"options": ("-line", "info")},
    "version": {"nvrtc_version": "13.5.38"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_degraded", set())
    return tmp_path / "cache"


def test_every_ingredient_changes_the_key(monkeypatch):
    keys = {label: cache.key(**(BASE | change)) for label, change in CHANGES.items()}
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    keys["format"] = cache.key(**BASE)
    monkeypatch.undo()
    keys["base"] = cache.key(**BASE)
    assert len(set(keys.values())) == len(CHANGES) + 2


def test_a_key_is_stable_and_names_the_kernel():
    assert re.fullmatch(r"k-sm_80-[0-9a-f]{40}", cache.key(**BASE))
    assert cache.key(**BASE) == cache.key(**(BASE | {"source": source()}))
    assert len(cache.path(cache.key(**(BASE | {"source": source(name="k" * 500)}))).name) < 200


def test_round_trip(folder):
    image = bytes(range(256)) * 50 + b"\n\n"
    assert cache.read("k") is None
    assert cache.write("k", image, dataclasses.asdict(REPORT)) == folder / "k.cubin"
    assert cache.read("k") == (image, dataclasses.asdict(REPORT))
    assert [p.name for p in folder.iterdir()] == ["k.cubin"], "a temporary file was left behind"


@pytest.mark.skipif(sys.platform == "win32", reason="file modes of POSIX")
def test_others_may_read_what_the_umask_allows(folder):
    old = os.umask(0o022)
    try:
        assert cache.write("k", b"", {}).stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(old)


def test_the_environment_moves_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert cache.directory() == tmp_path / "elsewhere"
    monkeypatch.delenv("FLASHGEN_CACHE_DIR")
    assert "flashgen" in str(cache.directory())


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: b"",
        lambda entry: entry[:30],
        lambda entry: entry[:-1],
        lambda entry: entry[:200] + bytes([entry[200] ^ 1]) + entry[201:],
        lambda entry: entry.replace(b"512", b"513"),
        lambda entry: os.urandom(4000),
    ],
    ids=["empty", "in the checksum", "truncated", "a bit", "the report", "noise"],
)
def test_a_damaged_entry_is_no_entry_and_warns(damage, caplog):
    file = cache.write("k", bytes(1000), dataclasses.asdict(REPORT))
    file.write_bytes(damage(file.read_bytes()))
    assert cache.read("k") is None
    assert "damaged" in caplog.text and str(file) in caplog.text


def test_an_entry_of_another_form_is_no_entry(caplog):
    cache.write("k", b"", {"registers": 3})
    assert compile._load(source(), "sm_80", "k") is None
    assert "another form" in caplog.text


def test_a_directory_that_refuses_warns_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(3):
        assert cache.read("k") is None
        with cache.lock("k"):
            assert cache.write("k", b"", {}) is None
    assert len(caplog.records) == 1 and "FLASHGEN_CACHE_DIR" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_read_only_directory_still_serves(folder, caplog):
    cache.write("k", b"image", {})
    folder.chmod(0o500)
    try:
        assert cache.write("j", b"", {}) is None and cache.read("k") == (b"image", {})
    finally:
        folder.chmod(0o700)
    assert len(caplog.records) == 1


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cache.write("k", b"image", {}) is None
    assert list(folder.iterdir()) == [] and "No space left" in caplog.text


def test_a_lock_held_too_long_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.05)
    with cache.lock("k"), cache.lock("k"):
        pass
    assert "another process held" in caplog.text


@pytest.mark.parametrize(
    ("names", "version"),
    [
        (["cupy_cuda13x-14.2.0.dist-info", "nvidia_cuda_nvrtc-13.5.37.dist-info"], "13.5.37"),
        (["cupy_cuda12x-14.2.0.dist-info", "nvidia_cuda_nvrtc_cu12-12.8.93.dist-info"], "12.8.93"),
        (
            [
                "cupy_cuda12x-14.2.0.dist-info",
                "nvidia_cuda_nvrtc-13.0.88.dist-info",
                "nvidia_cuda_nvrtc_cu12-12.8.93.dist-info",
            ],
            "12.8.93",
        ),
        (["cupy_cuda13x-14.2.0.dist-info"], None),
        (["nvidia_cuda_nvrtc-13.5.37.dist-info"], None),
        (["cupy_cuda13x-14.2.0.dist-info", "nvidia_cuda_nvrtc_cu12-12.8.93.dist-info"], None),
    ],
)
def test_the_installed_nvrtc_is_the_one_that_cupy_loads(names, version, tmp_path, monkeypatch):
    for name in names:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "no.zip"), str(tmp_path)])
    assert cache.installed_nvrtc() == version


WARM = """
import sys, time
from types import SimpleNamespace
from flashgen.runtime import cache, compile
cache.sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
cubin = compile.nvrtc(SimpleNamespace(name="k", text="", headers=()), "sm_80")
print(time.perf_counter() - start, cubin.report.cached, len(cubin.image), *({"cupy", "filelock"} & set(sys.modules)))
"""


def test_a_warm_hit_takes_under_50_ms_and_no_cupy(folder, tmp_path):
    for name in ("cupy_cuda13x-99.0.dist-info", "nvidia_cuda_nvrtc-13.77.1.dist-info"):
        (tmp_path / name).mkdir()
    key = cache.key(source(text="", headers=()), "sm_80", (), "13.77.1")
    cache.write(key, bytes(100_000), dataclasses.asdict(REPORT))
    best = float("inf")
    for _ in range(3):  # the best of three: another test may hold the core
        command = [sys.executable, "-c", WARM, str(tmp_path)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        seconds, *rest = run.stdout.split()
        assert rest == ["True", "100000"], run.stdout
        best = min(best, float(seconds))
    print(f"{best * 1e3:.1f} ms a warm hit")
    assert best < 0.050, f"a warm hit takes {best * 1e3:.0f} ms"
