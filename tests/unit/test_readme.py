"""The documents tell the truth: dumps are what is printed now, examples run, commands, paths and names exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from flashgen import debug
from flashgen.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MASKS = (ROOT / "examples" / "masks" / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def refresh():
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The live blocks


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md", "examples/masks/README.md"])
def test_refreshing_changes_nothing(refresh, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert refresh.refreshed(text) == text, f"{name} is old: run python docs/refresh.py"


def test_every_block_is_used_and_closed(refresh):
    every = README + ARCHITECTURE + MASKS
    opened = re.findall(r"<!-- live: (\w+) -->", every)
    assert sorted(opened) == sorted(refresh.BLOCKS)
    assert every.count("<!-- end -->") == len(opened)


def test_the_pictures_of_the_masks_are_what_is_drawn_now(refresh):
    image = pytest.importorskip("matplotlib.image")
    paths = refresh.examples()
    assert {path.stem for path in paths} == {path.stem for path in refresh.PICTURES.iterdir()} and len(paths) >= 20
    for path in paths:
        picture = refresh.PICTURES / f"{path.stem}.png"
        shown = (image.imread(picture)[..., :3] * 255).round()
        assert (shown == refresh.mask.pixels(refresh.drawing(path))).all(), f"{picture}: run python docs/refresh.py"
        assert picture.stat().st_size < 15_000


def test_a_stale_block_is_rewritten(refresh):
    text = "before\n<!-- live: chips -->\nold\n<!-- end -->\nafter\n"
    new = refresh.refreshed(text)
    assert new == f"before\n<!-- live: chips -->\n{refresh.chips()}<!-- end -->\nafter\n"
    assert "sm_120" in new and "old\n" not in new
    assert refresh.refreshed(new) == new


def test_an_excerpt_marks_what_it_leaves_out(refresh):
    text = "a\n  b\n\n  c\nd\n    e\nf\n"
    assert refresh.excerpt(text, ((r"b", r"c"), (r"e", r"e"))) == "  ...\n  b\n  c\n    ...\n    e\n    ..."
    assert refresh.excerpt(text, ((r"a", r"f"),)) == "a\n  b\n  c\nd\n    e\nf"
    with pytest.raises(LookupError, match="nothing"):
        refresh.excerpt(text, ((r"nothing", r"e"),))


# The examples


def run(source, namespace):
    """Runs an example; the pairs (printed, promised) of its prints, where the comment behind one says what it shows."""
    shown = []
    namespace["print"] = lambda *values: shown.append(" ".join(map(str, values)))
    exec(compile(source, "README.md", "exec"), namespace)
    promised = [line.partition("  # ")[2] for line in source.splitlines() if line.startswith("print(")]
    return [pair for pair in zip(shown, promised, strict=True) if pair[1]]


def test_the_python_examples_do_what_they_say(monkeypatch):
    pytest.importorskip("torch")
    for name in debug.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    namespace = {}
    pairs = [pair for source in PYTHON for pair in run(source, namespace)]
    assert len(PYTHON) >= 8 and len(pairs) >= 6
    for shown, promised in pairs:
        assert shown == promised


# Commands, variables, paths and names


def test_the_commands_are_understood():
    lines = [line.strip() for line in (README + MASKS).splitlines() if line.startswith("    python -m flashgen ")]
    assert len(lines) >= 5
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)[3:]
        command = main.get_command(click.Context(main), name)
        assert command is not None, line
        command.make_context(name, arguments)  # parses and runs nothing


def test_the_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE)
    assert {"generate", "test", "gpu-test", "bench", "check", "demo"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_variables_are_those_that_are_read():
    assert set(re.findall(r"^\| `(FLASHGEN_\w+)` \|", README, re.MULTILINE)) == set(debug.VARIABLES)


def test_the_debug_levels_are_those_that_exist():
    row = re.search(r"^\| `FLASHGEN_DEBUG` \|.*$", README, re.MULTILINE)[0]
    assert re.findall(r"(\d):", row) == [str(number) for number in range(1, len(debug.LEVELS) + 1)]


QUOTED = [
    (name, quoted)
    for name, text in (("README.md", README), ("docs/architecture.md", ARCHITECTURE))
    for quoted in dict.fromkeys(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.M)))
]
OF_OTHERS = {"mma.sync", "cp.async"}  # of PTX


def test_the_paths_exist():
    paths = [(name, quoted) for name, quoted in QUOTED if re.fullmatch(r"[\w.]+(/[\w.]*)+", quoted)]
    assert len(paths) > 40
    missing = [pair for pair in paths if not any((folder / pair[1]).exists() for folder in (ROOT, ROOT / "flashgen"))]
    assert not missing


def test_the_names_exist():
    """Each identifier in backquotes, and each part of a dotted one, is a word of the sources."""
    folders = ("flashgen", "templates", "tests", "docs")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    files = [path for path in files if path.name != Path(__file__).name]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    words |= set(COMMANDS) | set(re.findall(r"\w+", (ROOT / "Makefile").read_text(encoding="utf-8")))
    names = [pair for pair in QUOTED if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", pair[1]) and pair[1] not in OF_OTHERS]
    assert len(names) > 60
    missing = [pair for pair in names if not set(re.findall(r"[A-Za-z_]\w*", pair[1])) <= words]
    missing = [pair for pair in missing if not (ROOT / pair[1]).exists()]
    assert not missing


CODE = {".py", ".jinja", ".cuh"}
