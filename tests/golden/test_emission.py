"""What is emitted depends on the spec and the chip alone, and generated/ is what is emitted now."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen import catalog
from flashgen.cli.generate import present

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "generated"

DIGEST = """
import hashlib
from flashgen import catalog
from flashgen.spec import Spec
for spec in (Spec(64, 64, causal=True), Spec(40, 40), Spec(64, 32, deterministic=True)):
    for path, text in catalog.files(spec).items():
        print(path, hashlib.sha256(text.encode()).hexdigest())
"""

# What must not be in a generated text: places on a disk, addresses of objects, dates and times of day.
FOREIGN = re.compile(
    r"/(?:home|root|tmp|usr|work)/|\bat 0x[0-9a-f]{6,}|<[\w.]+ object|\b20\d\d-\d\d-\d\d\b|\b\d\d:\d\d:\d\d\b"
)


def digests(seed):
    environment = os.environ | {"PYTHONHASHSEED": seed}
    run = subprocess.run(
        [sys.executable, "-c", DIGEST], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines()


def test_the_text_does_not_depend_on_the_order_of_sets():
    first = digests("0")
    assert len(first) == 18 + 18 + 21
    assert first == digests("1")


@pytest.mark.parametrize("spec", catalog.SPECS, ids=str)
def test_generated_is_what_is_emitted_now(spec):
    wrong = []
    for path, text in catalog.files(spec).items():
        file = GENERATED / path
        if not file.is_file() or file.read_bytes() != text.encode():
            wrong.append(path)
    assert not wrong, f"run make generate: {wrong}"


def test_generated_holds_nothing_else():
    specs = {
        f"{family}/{spec}" for family in ("sm80", "sm90") for spec in catalog.SPECS if not catalog.forward_only(spec)
    }
    specs |= {f"sm90/{spec}" for spec in catalog.SPECS}
    specs -= {f"sm90/{spec}" for spec in catalog.SPECS if spec.dtype.bytes == 4}  # the sm80 family's alone
    there = {path.rpartition("/")[0] for path in present(GENERATED)}
    assert there == specs


def test_a_generated_text_names_no_place_and_no_time():
    for name in present(GENERATED):
        text = (GENERATED / name).read_text(encoding="utf-8")
        text = re.sub(r"\(chosen by measurement: .*\)", "", text)  # a measurement has its date
        found = FOREIGN.search(text)
        assert not found and str(ROOT) not in text, f"{name}: {found and found[0]}"


def faults(text):
    """What nobody would have written: constants without a use, empty lines that end a block, neutral operands."""
    code = re.sub(r"//.*", "", text)
    constants = re.findall(r"\bconstexpr int (\w+)", code)
    yield from (f"{name} is not used" for name in constants if len(re.findall(rf"\b{name}\b", code)) < 2)
    if re.search(r"\n\s*\n\s*\}", text):
        yield "an empty line before a closing brace"
    body = code.partition("__global__")[2]
    yield from (f"{found} changes nothing" for found in re.findall(r"[-+] 0\b(?!\.)|[*/] 1\b(?!\.)|\b[01] \* ", body))


@pytest.mark.parametrize("spec", catalog.SPECS, ids=str)
def test_an_emitted_text_has_nothing_that_does_nothing(spec):
    texts = [text for path, text in catalog.files(spec).items() if path.endswith(".cu")]
    assert len(texts) >= (4 if spec.differentiable and not catalog.forward_only(spec) else 1)
    assert all("constexpr int THREADS" in text for text in texts)
    assert [fault for text in texts for fault in faults(text)] == []


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("constexpr int N = 1;  // N\nconstexpr int M = 1;\nf(M, TRUE_N);", "N is not used"),
        ("if (x) {\n  a;\n\n}\n", "an empty line before a closing brace"),
        ("__global__ f(n - 0);", "- 0 changes nothing"),
        ("__global__ f(0 + n * 1);", "* 1 changes nothing"),
        ("__global__ f(n, 0 * n);", "0 *  changes nothing"),
    ],
)
def test_a_planted_fault_is_seen(planted, fault):
    assert list(faults(planted)) == [fault]


def test_generated_files_are_small_enough_to_read():
    for name in present(GENERATED):
        lines = (GENERATED / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) < 540, f"{name} has {len(lines)} lines"
