"""What a compiled kernel shows of itself, for every chip, without a GPU."""

import hashlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import flashgen

ROOT = Path(__file__).resolve().parents[2]
ARCHES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120"]


def texts(kernel):
    return [dict(kernel.ir), dict(kernel.machine_ir), dict(kernel.source)]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("options", [{"head_dim": 128}, {"head_dim": 40, "causal": False, "head_dim_v": 24}], ids=str)
def test_every_stage_is_text(arch, options):
    kernel = flashgen.compile(**options, arch=arch)
    ir, machine, source = texts(kernel)
    assert len(source) >= 3, "a forward, and a backward in two parts at least"
    assert set(machine) == set(source) and set(ir) == set(source)
    for name in source:
        assert name.isidentifier()
        assert all(isinstance(stage[name], str) and stage[name].strip() for stage in (ir, machine, source))
        assert f"{name}(" in source[name] and "__global__" in source[name] and 'extern "C"' in source[name]
    assert any("bwd" in name or "backward" in name for name in source)
    assert any("fwd" in name or "forward" in name for name in source)


@pytest.mark.parametrize("arch", ARCHES)
def test_explain_says_what_was_chosen_and_what_was_not(arch):
    text = flashgen.compile(256, arch=arch).explain()
    assert isinstance(text, str) and arch in text
    assert "KiB" in text and "exceed" in text, text


def test_the_algorithms_names_survive_into_the_cuda():
    source = dict(flashgen.compile(64, arch="sm_80").source)
    forward = next(text for name, text in source.items() if "fwd" in name or "forward" in name)
    for word in ("row_max", "row_sum", "lse", "kv_block", "q_block"):
        assert word in forward, word


def test_nothing_of_this_machine_is_in_the_text():
    for stage in texts(flashgen.compile(64, arch="sm_80")):
        for text in stage.values():
            assert str(ROOT) not in text and str(Path.home()) + "/" not in text and " at 0x" not in text


def test_chips_differ_where_their_memory_does():
    small, large = (flashgen.compile(256, arch=arch) for arch in ("sm_86", "sm_80"))
    assert str(small.plan) != str(large.plan) and dict(small.source) != dict(large.source)


def test_what_is_specialised_is_in_the_spec():
    options = [
        {},
        {"causal": False},
        {"dtype": "float16"},
        {"head_dim": 64},
        {"head_dim_v": 64},
        {"deterministic": True},
    ]
    specs = [flashgen.compile(**({"head_dim": 128} | changes), arch="sm_80").spec for changes in options]
    assert len(set(specs)) == len({str(spec) for spec in specs}) == len(options)


def test_dtype_may_be_a_torch_dtype():
    torch = pytest.importorskip("torch")
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        assert flashgen.compile(64, dtype=dtype).spec == flashgen.compile(64, dtype=name).spec


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("float16"), np.zeros(1, np.float16).dtype], ids=repr)
def test_dtype_may_be_a_numpy_dtype(dtype):
    assert flashgen.compile(64, dtype=dtype).spec == flashgen.compile(64, dtype="float16").spec


class Index:
    """What else counts as an integer."""

    def __index__(self):
        return 64


@pytest.mark.parametrize("integer", [np.int64(64), np.uint8(64), np.array(64), Index()], ids=lambda x: type(x).__name__)
def test_head_dims_may_be_any_integer(integer):
    kernel = flashgen.compile(integer, head_dim_v=integer)
    assert kernel is flashgen.compile(64)
    assert type(kernel.spec.head_dim) is type(kernel.spec.head_dim_v) is int


def test_the_made_up_chip_shows_all_but_cuda():
    kernel = flashgen.compile(8, arch="toy")
    assert all(text.strip() for stage in (kernel.ir, kernel.machine_ir) for text in stage.values())
    assert set(kernel.plan) == set(kernel.ir) and "toy" in kernel.explain()
    for name in ("source", "report"):
        with pytest.raises(ValueError, match=r"arch = 'toy' is made up .* use sm_80") as caught:
            getattr(kernel, name)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="arch = 'toy' is made up"):
            getattr(flashgen.compile(128, arch="toy"), name)  # which would not fit on it either


def test_compiling_twice_costs_nothing():
    first = flashgen.compile(64, arch="sm_80")
    texts(first)
    start = time.perf_counter()
    second = flashgen.compile(64, arch="sm_80")
    stages = texts(second)
    assert time.perf_counter() - start < 0.02, "compiling or printing was done again"
    assert stages == texts(first) and second.spec == first.spec and second.plan == first.plan


def test_compiling_is_the_same_in_threads():
    def fingerprint(_):
        return hashlib.sha256(repr(texts(flashgen.compile(96, arch="sm_89"))).encode()).hexdigest()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(fingerprint, range(16)))) == 1


def test_lengths_change_nothing():
    """Sizes are arguments at run time: calls with other lengths, batches and heads leave every text as it was."""
    kernel = flashgen.compile(16, True, dtype="float16", arch="sm_80")
    before = texts(kernel)
    for batch, seqlen_q, seqlen_k, heads in ((1, 1, 1, 1), (2, 33, 70, 4), (1, 130, 64, 2)):
        q = np.zeros((batch, seqlen_q, heads, 16), np.float16)
        kv = np.zeros((batch, seqlen_k, 1, 16), np.float16)
        assert kernel(q, kv, kv).shape == q.shape
    assert texts(kernel) == before


FINGERPRINT = """
import hashlib, flashgen
k = flashgen.compile(128, arch="sm_80")
stages = [str(k.spec), str(k.plan), k.explain(), dict(k.ir), dict(k.machine_ir), dict(k.source)]
print(hashlib.sha256(repr(stages).encode()).hexdigest())
"""


def test_every_stage_is_the_same_under_another_hash_seed():
    found = set()
    for seed in ("0", "1", "2"):
        command = [sys.executable, "-c", FINGERPRINT]
        run = subprocess.run(command, cwd=ROOT, env=environment(PYTHONHASHSEED=seed), capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-1000:]
        found.add(run.stdout)
    assert len(found) == 1


def environment(**changes):
    import os

    return os.environ | changes


def field(record, word):
    """The number whose name holds `word`, in a mapping or an object with attributes."""
    entries = record if isinstance(record, dict) else {name: getattr(record, name) for name in dir(record)}
    values = [value for name, value in entries.items() if word in name and isinstance(value, int | float)]
    assert values, f"no number named like {word} in {record}"
    return values


@pytest.mark.parametrize("arch", ARCHES)
def test_report_compiles_without_a_gpu(arch):
    """NVRTC only. Nothing spills; every kernel of the source is in the report, with what it takes."""
    pytest.importorskip("cupy")
    kernel = flashgen.compile(64, arch=arch)
    report = dict(kernel.report)
    assert set(report) == set(kernel.source)
    for name, record in report.items():
        assert all(0 < n <= 255 for n in field(record, "registers")), name
        assert not any(field(record, "spill")), f"{name} spills"
        assert all(n >= 0 for n in field(record, "shared")) and all(n > 0 for n in field(record, "seconds"))
