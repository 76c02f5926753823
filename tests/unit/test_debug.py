"""The debugging switches: each level that is advertised shows something, and the levels that are not are refused."""

import logging
import os
import stat
from itertools import pairwise
from types import SimpleNamespace

import pytest

from flashgen import build, debug
from flashgen.plan.arch import parse_arch
from flashgen.runtime import cache, compile, sass
from flashgen.spec import Spec

SOURCE = SimpleNamespace(name="k", text="", headers=())
FIELDS = {
    "registers": 40,
    "spill_stores": 0,
    "spill_loads": 0,
    "static_shared": 0,
    "stack": 0,
    "seconds": 1.0,
    "cached": False,
    "nvrtc_version": "13.5",
    "log": "",
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """No variable is set, nothing is cached, no tool is on the PATH; the logger is as before when the test ends."""
    for name in debug.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    handlers, level = debug.log.handlers[:], debug.log.level
    debug.log.handlers.clear()
    yield
    debug.log.handlers[:] = handlers
    debug.log.setLevel(level)


@pytest.fixture
def cached(monkeypatch):
    """A kernel that is in the cache of cubins."""
    monkeypatch.setattr(cache, "installed_nvrtc", lambda: "13.5.37")
    cache.write(cache.key(SOURCE, "sm_80", (), "13.5.37"), b"image", FIELDS)


@pytest.fixture
def compiled(monkeypatch):
    """A compiler that needs no CuPy."""
    monkeypatch.setattr(cache, "installed_nvrtc", lambda: "13.5.37")
    monkeypatch.setattr(compile, "_loaded_version", lambda installed: installed)
    monkeypatch.setattr(compile, "_run_nvrtc", lambda *_: (b"image", "log"))
    monkeypatch.setattr(compile, "resources", lambda *_: dict(list(FIELDS.items())[:5]))


def plant(folder, name, script):
    """A program on the PATH."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("value", ["x", "6", "7", "-1", "1.0", "03", " 1", "²", "10"])
def test_what_is_no_level_is_refused_in_one_sentence(monkeypatch, value):
    monkeypatch.setenv("FLASHGEN_DEBUG", value)
    with pytest.raises(ValueError, match=r"^FLASHGEN_DEBUG = '.*' must be a number from 0 to 5; .+$"):
        debug.level()


@pytest.mark.parametrize(("value", "level"), [(None, 0), ("", 0), ("0", 0), ("5", 5)])
def test_levels(monkeypatch, value, level):
    if value is not None:
        monkeypatch.setenv("FLASHGEN_DEBUG", value)
    assert debug.level() == level


def test_every_level_that_is_advertised_shows_more(monkeypatch, cached, tmp_path, capsys):
    plant(tmp_path, "nvdisasm", "echo code")
    shown = []
    for level in range(len(debug.LEVELS) + 1):
        monkeypatch.setenv("FLASHGEN_DEBUG", str(level))
        build._forward.cache_clear()
        build.forward(Spec(16, 16), parse_arch("sm_80"))
        compile.nvrtc(SOURCE, "sm_80")
        lines = capsys.readouterr().err.splitlines()
        shown.append(
            {line.split()[1] if line.startswith("--- ") else "log" for line in lines if line[:3] in ("---", "loa")}
        )
    assert shown[0] == set()
    assert all(less < more for less, more in pairwise(shown)), shown
    assert shown[-1] == {"log", "plan", "tile", "ir", "cu", "sass"}
    assert f"{len(debug.LEVELS)} SASS" in debug.VARIABLES["FLASHGEN_DEBUG"]


def test_a_cache_hit_and_a_compile_are_one_line_each(monkeypatch, compiled, capsys):
    for word in ("compiled k for sm_80 in", "loaded k for sm_80 in"):
        monkeypatch.setenv("FLASHGEN_DEBUG", "1")
        compile.nvrtc(SOURCE, "sm_80")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(word)


def test_without_a_level_nothing_is_said(cached, capsys):
    compile.nvrtc(SOURCE, "sm_80")
    assert capsys.readouterr() == ("", "")


def test_the_log_is_left_to_who_has_a_handler(monkeypatch, cached, capsys):
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    debug.log.addHandler(logging.NullHandler())
    compile.nvrtc(SOURCE, "sm_80")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("tool", sass.TOOLS)
@pytest.mark.parametrize("state", ["cached", "compiled"])
def test_the_disassembler_on_the_path_is_shown_the_whole_cubin(monkeypatch, request, tmp_path, capsys, tool, state):
    """It is handed its options and a file with the byte that CuPy cuts off."""
    request.getfixturevalue(state)
    plant(tmp_path, tool, f'echo "{tool} $1"; /usr/bin/od -An -c "$2"')
    monkeypatch.setenv("FLASHGEN_DEBUG", "5")
    compile.nvrtc(SOURCE, "sm_80")
    said = capsys.readouterr().err.split("--- sass k\n")[1].split()
    assert said == [tool, *sass.TOOLS[tool], *"image", r"\0"]


def test_a_dump_holds_the_sass(monkeypatch, cached, tmp_path, capsys):
    plant(tmp_path, "nvdisasm", "echo code")
    monkeypatch.setenv("FLASHGEN_DUMP", str(tmp_path / "dump"))
    compile.nvrtc(SOURCE, "sm_80")
    (file,) = (tmp_path / "dump").iterdir()
    assert file.name.endswith("-k.sass") and file.read_text() == "code\n" and capsys.readouterr().err == ""


@pytest.mark.parametrize("inside", [False, True], ids=["a file", "below a file"])
def test_a_dump_that_is_no_folder_is_named(monkeypatch, tmp_path, inside):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("FLASHGEN_DUMP", str(file / "folder" if inside else file))
    with pytest.raises(OSError, match=r"FLASHGEN_DUMP = '.*file.*' takes no file \(.*\); set a folder or unset it"):
        debug.show(2, "plan", "k", "text")


@pytest.mark.parametrize("script", [None, "exit 3"])
def test_without_a_disassembler_that_works_there_is_one_sentence(monkeypatch, cached, tmp_path, capsys, script):
    if script:
        plant(tmp_path, "nvdisasm", script)
    monkeypatch.setenv("FLASHGEN_DEBUG", "5")
    assert compile.nvrtc(SOURCE, "sm_80").image == b"image"
    _, line = capsys.readouterr().err.splitlines()
    assert line.startswith("the SASS of k is not shown: ") and "nvdisasm" in line


@pytest.mark.parametrize("level", ["0", "1", "4"])
def test_a_lower_level_runs_no_disassembler(monkeypatch, cached, tmp_path, level):
    plant(tmp_path, "nvdisasm", f"echo > {tmp_path / 'ran'}")
    monkeypatch.setenv("FLASHGEN_DEBUG", level)
    compile.nvrtc(SOURCE, "sm_80")
    assert not os.path.exists(tmp_path / "ran")
