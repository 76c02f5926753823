"""The command line: options, texts, errors in one sentence, and what generate writes, removes and complains of."""

import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

import flashgen
from flashgen import build, catalog, debug
from flashgen.__main__ import COMMANDS, main
from flashgen.cli import generate
from flashgen.cli.options import ByteCount
from flashgen.cli.show import FLAGS
from flashgen.ir.nodes import For
from flashgen.plan.planner import PlanError
from flashgen.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--head-dim", "64")


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def output(*arguments):
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def sentence(*arguments):
    """What a failing command says."""
    result = call(*arguments)
    assert result.exit_code == 1 and result.stderr.startswith("Error: "), result.output
    return result.stderr.removeprefix("Error: ").strip()


def test_help_lists_every_command_and_teaches():
    text = output("--help")
    assert all(name in text for name in COMMANDS) and "python -m flashgen show" in text


@pytest.mark.parametrize("name", ["explain", "show", "generate", "env"])
def test_help_of_a_command_has_examples(name):
    assert f"python -m flashgen {name}" in output(name, "--help")


def test_starting_is_light():
    """The list of commands imports none of them."""
    code = "import sys; from flashgen.__main__ import main\n" + (
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(*{'torch', 'cupy', 'rich', 'flashgen.catalog'} & set(sys.modules), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stderr.split() == []


def test_the_module_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "flashgen", "explain", "--head-dim", "12"], cwd=ROOT, capture_output=True
    )
    assert run.returncode == 1 and b"Traceback" not in run.stderr and b"12" in run.stderr


def test_explain_prints_every_kernel_or_the_one_named():
    every = output("explain", *SMALL, "--causal")
    assert re.findall(r"^plan (\w+)", every, re.M) == [
        "attention_forward",
        "attention_delta",
        "attention_backward",
        "attention_convert_dq",
    ]
    one = output("explain", *SMALL, "--causal", "--kernel", "attention_forward")
    assert re.findall(r"^plan (\w+)", one, re.M) == ["attention_forward"]
    assert ("rejected:" in one and one in every.replace("plan attention_delta", "\n", 1)) or one.strip() in every


def test_explain_with_less_memory():
    text = output("explain", "--kernel", "forward", "--sram", "64KiB")
    assert "64 KiB of shared memory a block" in text.splitlines()[0]
    assert "exceed the 64 KiB of a block" in text


@pytest.mark.parametrize("more", [(), ("--deterministic",)], ids=str)
def test_less_memory_holds_for_every_kernel_of_a_chip_with_two_families(more):
    """Those that sm_90a takes from sm_90 too."""
    text = output("explain", "--arch", "sm_90a", "--sram", "216KiB", *more)
    of = dict(re.findall(r"^plan attention_(\w+) for (\w+)", text, re.M))
    assert set(of.values()) == {"sm_90a", "sm_90"} and len(of) == 4
    used, limits = zip(*re.findall(r"shared memory (\d+) of (\d+) bytes", text), strict=True)
    assert set(limits) == {str(216 * 1024)} and max(map(int, used)) <= 216 * 1024
    assert "exceed the 227 KiB" not in text


def test_a_kernel_that_does_not_fit_hides_no_other(monkeypatch):
    """Neither the forward the backward nor the other way round, and the sentence names all that do not fit."""
    wide = call("explain", "--head-dim", 256, "--arch", "sm_90a", "--sram", "160KiB").stderr
    assert all(f"no tile of attention_{name} fits sm_90a" in wide for name in ("forward", "backward_dq"))
    deep = call("explain", "--head-dim", 128, "--sram", "32KiB")
    assert "plan attention_forward for sm_80" in deep.stdout and "no tile of attention_backward" in deep.stderr
    none = call("explain", "--head-dim", 128, "--sram", "1KiB").stderr
    assert all(f"no tile of attention_{name} fits sm_80" in none for name in ("forward", "backward"))
    assert len(none.splitlines()) == 1

    def too_small(spec, arch):
        raise PlanError("no tile of the forward fits")

    monkeypatch.setattr(build, "forward", too_small)
    only = call("explain", "--head-dim", 128)
    assert "plan attention_backward for sm_80" in only.stdout and only.exit_code == 1
    assert only.stderr == "Error: no tile of the forward fits\n"


def test_a_tile_that_no_plan_fits_is_one_sentence():
    said = sentence("explain", "--head-dim", 256, "--kernel", "forward", "--sram", "4K")
    assert "\n" not in said and "KiB" in said and "attention_forward" in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--head-dim", 100), "head_dim = 100"),
        (("--head-dim", 584), "head_dim = 584"),
        (("--head-dim-v", 12), "head_dim_v = 12"),
        (("--dtype", "int8"), "int8"),
        (("--arch", "sm_999"), "sm_999"),
        (("--kernel", "sideways"), "sideways"),
        (("--kernel", "convert_dq", "--deterministic"), "has no kernel convert_dq"),
        (("--kernel", "backward_dq"), "has no kernel backward_dq"),
        (("--sram", "0", "--kernel", "forward"), "positive"),
    ],
)
@pytest.mark.parametrize("name", ["explain", "show"])
def test_bad_options_are_one_sentence(name, arguments, complaint):
    said = sentence(name, *arguments)
    assert complaint in said and "\n" not in said


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m flashgen show --head-dim 64 --passes | head -1"
    run = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.startswith("=== attention_forward") and run.stderr == ""


def test_timing_without_a_gpu_is_one_sentence(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("bench", "tune"):
        said = sentence(name)
        assert "GPU" in said and "\n" not in said


def test_a_bug_keeps_its_traceback(monkeypatch):
    def broken(spec):
        raise AssertionError("a bug")

    monkeypatch.setattr(catalog, "files", broken)
    with pytest.raises(AssertionError, match="a bug"):
        call("generate", "--check")


def test_a_debug_level_keeps_the_traceback(monkeypatch):
    monkeypatch.setenv("FLASHGEN_DEBUG", "1")
    with pytest.raises(ValueError, match="head_dim = 12"):
        call("show", "--head-dim", 12)


@pytest.mark.parametrize("value", ["x", "7", "-1"])
@pytest.mark.parametrize("command", [("show", *SMALL, "--plan"), ("explain", *SMALL), ("generate", "--check")], ids=str)
def test_what_is_no_debug_level_is_one_sentence(monkeypatch, value, command):
    generate.catalog.build._forward.cache_clear()
    generate.catalog.build.backward.cache_clear()
    monkeypatch.setenv("FLASHGEN_DEBUG", value)
    said = sentence(*command)
    assert f"FLASHGEN_DEBUG = {value!r}" in said and "\n" not in said


def test_what_is_no_debug_level_has_no_traceback():
    command = [sys.executable, "-m", "flashgen", "show", *SMALL, "--plan"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"FLASHGEN_DEBUG": "x"})
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and run.stderr.startswith("Error: FLASHGEN_DEBUG")


def test_the_version():
    assert output("--version").split() == ["flashgen,", "version", flashgen.__version__]


@pytest.mark.parametrize(
    ("text", "count"),
    [("65536", 65536), ("64KiB", 65536), ("96K", 98304), ("96kb", 98304), ("1 MiB", 1 << 20), ("7B", 7)],
)
def test_byte_counts(text, count):
    assert ByteCount().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["64GiB", "KiB", "-1", "1.5K", "64KiB2"])
def test_bad_byte_counts(text):
    result = call("explain", "--sram", text)
    assert result.exit_code == 2 and "64KiB" in result.stderr


def test_show_prints_each_stage():
    made = catalog.files(Spec(64, 64))
    path = "sm80/d64_bf16/attention_forward"
    assert output("show", *SMALL) == output("show", *SMALL, "--cuda") == made[f"{path}.cu"]
    assert output("show", *SMALL, "--plan") == made[f"{path}.plan"]
    assert f"{output('show', *SMALL, '--ir')}\n{output('show', *SMALL, '--machine')}" == made[f"{path}.ir"]


def test_show_passes_begins_with_tile_and_ends_with_machine():
    text = output("show", *SMALL, "--passes")
    steps = text.split("=== ")[1:]
    assert output("show", *SMALL, "--ir") in steps[0]
    assert steps[-1].split("\n", 1)[1] == output("show", *SMALL, "--machine")
    titles = [step.split("\n")[0] for step in steps]
    assert len(titles) == len(set(titles)) >= 4
    assert all(re.fullmatch(r"\w+: .+", title) for title in titles[1:]), titles


def test_the_graph_is_that_of_the_loop(tmp_path):
    stages = next(iter(generate.catalog.build.forward(Spec(64, 64), catalog.SHOWN)))
    loop = next(stmt for stmt in stages.tile.body if isinstance(stmt, For))
    file = tmp_path / "loop.dot"
    text = output("show", *SMALL, "--graph", "--dot", file)
    assert f"{len(loop.body)} statements" in text
    assert re.search(r"reads k_tile of \d", text)
    drawn = file.read_text()
    assert drawn.startswith('digraph "attention_forward" {\n') and drawn.endswith("}\n")
    assert len(re.findall(r"^  n\d+ \[label=", drawn, re.M)) == len(loop.body)
    assert text.splitlines()[0].endswith(f"{len(re.findall(r' -> n', drawn))} dependences")


def test_a_graph_of_a_kernel_without_a_loop():
    assert "attention_delta" in output("show", *SMALL, "--graph", "--kernel", "delta")


@pytest.mark.parametrize("pair", list(combinations(FLAGS, 2)), ids="-".join)
def test_two_stages_at_once_are_refused(pair):
    result = call("show", *SMALL, *(f"--{name}" for name in pair))
    assert result.exit_code == 2 and result.stdout == ""
    assert f"--{pair[0]} and --{pair[1]} exclude each other" in result.stderr and "give one of them" in result.stderr


def test_one_file_does_not_hold_several_graphs():
    for every in ("all", "attention_all"):
        assert call("show", "--graph", "--kernel", every, "--dot", "x.dot").exit_code == 2


@pytest.fixture
def small_catalog(monkeypatch):
    monkeypatch.setattr(catalog, "SPECS", (Spec(16, 16),))


def test_generate_writes_removes_and_checks(small_catalog, tmp_path):
    folder = tmp_path / "out"
    command = ("generate", "--out", folder)
    stale = folder / "sm80" / "d8_bf16" / "attention_forward.cu"
    stale.parent.mkdir(parents=True)
    stale.write_text("old")
    kept = folder / "README.md"
    kept.write_text("not ours")

    assert "18 files, 18 written, 1 removed" in " ".join(output(*command, "--no-compile").split())
    assert not stale.parent.exists() and kept.exists()
    assert "0 written, 0 removed" in " ".join(output(*command, "--no-compile").split())
    assert "up to date" in " ".join(output(*command, "--check").split())

    spec = folder / "sm80" / "d16_bf16"
    (spec / "attention_forward.cu").write_text("edited by hand")
    (spec / "attention_delta.plan").unlink()
    (spec / "extra.ir").write_text("")
    said = sentence(*command, "--check")
    assert "stale    sm80/d16_bf16/attention_forward.cu" in said
    assert "missing  sm80/d16_bf16/attention_delta.plan" in said
    assert "extra    sm80/d16_bf16/extra.ir" in said
    assert said.count("sm80/") == 3
    assert (spec / "attention_forward.cu").read_text() == "edited by hand", "--check writes nothing"


def test_generate_outside_a_checkout_says_what_to_do(small_catalog, monkeypatch, tmp_path):
    monkeypatch.setattr(generate, "PACKAGE", tmp_path / "flashgen")
    assert "--out" in sentence("generate", "--check")


def test_generate_compiles_and_prints_the_table(small_catalog, monkeypatch, tmp_path):
    pytest.importorskip("cupy", reason="NVRTC is found through CuPy")
    monkeypatch.setattr(catalog, "COMPILED", (catalog.SHOWN,))
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "cache"))
    result = call("generate", "--out", tmp_path / "out")
    for word in ("kernel", "spec", "arch", "tile", "stages", "shared", "registers", "spills", "seconds", "d16_bf16"):
        assert word in result.stdout
    assert "4 cubins" in result.stdout
    assert (result.exit_code == 1) == ("these kernels spill" in result.stderr)


def test_a_spill_fails_and_is_named(small_catalog, monkeypatch, tmp_path):
    from flashgen.runtime import compile as compiler
    from flashgen.runtime.compile import Cubin, Report

    def spilling(work, jobs=None, progress=None):
        said = Report(255, 8, 4, 0, 8, 2.5, False, "13", "")
        return [Cubin(source.name, arch, b"", said) for source, arch in work]

    monkeypatch.setattr(catalog, "COMPILED", (catalog.SHOWN,))
    monkeypatch.setattr(compiler, "compile_many", spilling)
    result = call("generate", "--out", tmp_path)
    assert result.exit_code == 1
    assert "attention_forward of d16_bf16 for sm_80 (12 bytes)" in result.stderr
    assert "over 2 s to compile: attention_forward of d16_bf16 for sm_80 (2.5 s)" in result.stdout


def test_env_names_what_matters(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "[red]"))
    text = output("env")
    for name in ("python", "flashgen", "numpy", "cupy", "nvrtc", "torch", "gpu", "cache", *debug.VARIABLES):
        assert name in text
    assert "[red]" in text and "0 kernels" in text


def test_every_variable_that_is_read_is_listed():
    read = set()
    for path in (ROOT / "flashgen").rglob("*.py"):
        read |= set(re.findall(r"\bFLASHGEN_[A-Z_]+", path.read_text(encoding="utf-8")))
    assert read == set(debug.VARIABLES)
