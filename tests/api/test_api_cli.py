"""python -m flashgen: explain, show, env, and help that teaches. No GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def flashgen(*arguments):
    command = [sys.executable, "-m", "flashgen", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def output(*arguments):
    run = flashgen(*arguments)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("command", [(), ("explain",), ("show",), ("generate",), ("bench",), ("env",)], ids=str)
def test_help(command):
    text = output(*command, "--help")
    assert len(text.split()) > 20, "help that teaches has more to say than the name of an option"


def test_explain_shows_the_choice_and_the_rejections():
    text = output("explain", "--head-dim", "128", "--causal", "--arch", "sm_86")
    assert "sm_86" in text and "KiB" in text and "exceed" in text


def test_more_shared_memory_moves_the_choice():
    def explained(sram):
        return output("explain", "--head-dim", "128", "--causal", "--arch", "sm_86", "--sram", sram)

    small, large = explained("48KiB"), explained("227KiB")
    assert small != large
    assert small.count("exceed") > large.count("exceed"), "less memory must reject more"


def test_a_chip_that_nothing_fits_is_refused_in_one_sentence():
    run = flashgen("explain", "--head-dim", "256", "--arch", "sm_86", "--sram", "1KiB")
    assert run.returncode != 0
    said = (run.stderr or run.stdout).strip()
    assert "Traceback" not in said and "1" in said and "KiB" in said, said


@pytest.mark.parametrize("bad", [("--head-dim", "100"), ("--head-dim", "64", "--arch", "sm_999")], ids=str)
def test_bad_options_are_refused_in_one_sentence(bad):
    run = flashgen("explain", *bad)
    assert run.returncode != 0
    assert "Traceback" not in run.stderr and bad[-1] in run.stderr


def test_the_made_up_chip_shows_all_but_cuda():
    toy = ("show", "--head-dim", "8", "--arch", "toy")
    for kernel in ("forward", "all"):
        run = flashgen(*toy, "--kernel", kernel)
        assert run.returncode != 0 and not run.stdout.strip()
        assert "Traceback" not in run.stderr and "toy" in run.stderr and len(run.stderr.splitlines()) == 1
    for stage in ("--ir", "--machine", "--plan", "--passes"):
        assert "attention_forward" in output(*toy, stage)


def test_env_knows_what_is_there():
    text = output("env")
    assert "FLASHGEN_CACHE_DIR" in text and "numpy" in text.lower()
