"""Small kernels through the real NVRTC: chips, headers, errors, the cache between processes. No GPU."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashgen import build, catalog
from flashgen.ir.dtype import F16
from flashgen.plan.arch import ARCHES
from flashgen.runtime import cache, compile
from flashgen.spec import Spec

pytest.importorskip("cupy")

ROOT = Path(__file__).resolve().parents[2]
HEADER = "template <int N> __device__ float twice(float x) { return x * N / (N / 2); }"
TEXT = """
#include "flashgen/small.cuh"
struct Args { float* x; int n; };
extern "C" __global__ void __launch_bounds__(128) small(const __grid_constant__ Args args) {
    __shared__ float s[128];
    s[threadIdx.x] = threadIdx.x < args.n ? twice<4>(args.x[threadIdx.x]) : 0.0f;
    __syncthreads();
    args.x[threadIdx.x] = s[127 - threadIdx.x];
}
"""


def source(text=TEXT, name="small"):
    return SimpleNamespace(name=name, text=text, headers=(("flashgen/small.cuh", HEADER),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_degraded", set())
    return tmp_path


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_a_small_kernel_compiles(arch, caplog):
    caplog.set_level(logging.INFO, "flashgen")
    cubin = compile.nvrtc(source(), arch)
    assert (cubin.name, cubin.arch, cubin.image[:4]) == ("small", arch, b"\x7fELF")
    report = cubin.report
    assert 4 <= report.registers <= 32 and report.static_shared == 512
    assert (report.spill_stores, report.spill_loads, report.stack, report.cached) == (0, 0, 0, False)
    assert 0 < report.seconds < 30 and report.nvrtc_version == compile.nvrtc_version()
    assert re.search(rf"compiled small for {arch} in .* s: {report.registers} registers, 0 \+ 0 bytes", caplog.text)
    again = compile.nvrtc(source(), arch)
    assert again.report.cached and again.image == cubin.image and again.report.seconds == report.seconds


UNCATALOGED = [arch for arch in ARCHES.values() if arch not in catalog.COMPILED]  # sm_87


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("arch", UNCATALOGED, ids=lambda arch: arch.name)
def test_chips_that_generate_leaves_out_compile(arch, stage):
    """`make generate` compiles for the other chips; here one kernel of each kind, and neither may spill."""
    spec = Spec(128, 128, causal=True)
    stages = {"forward": build.forward(spec, arch)[0], "backward": build.backward(spec, arch)[1]}[stage]
    cubin = compile.nvrtc(stages.source, arch.target)
    assert (cubin.name, cubin.arch, cubin.image[:4]) == (f"attention_{stage}", arch.name, b"\x7fELF")
    assert (cubin.report.spill_stores, cubin.report.spill_loads) == (0, 0)


FORWARDS = list(dict.fromkeys(spec.forward() for spec in catalog.SPECS if spec.dtype.bytes == 2))


@pytest.mark.parametrize("spec", FORWARDS, ids=str)
def test_the_catalog_compiles_for_hopper(spec):
    """No spills; a serialized wgmma or an ignored setmaxnreg is a CompileError."""
    stages = build.forward(spec, catalog.HOPPER)[0]
    assert stages.plan.arch == catalog.HOPPER
    report = compile.nvrtc(stages.source, catalog.HOPPER.target).report
    assert (report.spill_stores, report.spill_loads) == (0, 0)


PACKED = [Spec(64, 64, causal=True, packed=2), Spec(256, 256, causal=True, packed=16), Spec(128, 128, packed=64)]


@pytest.mark.parametrize("spec", [*PACKED, Spec(192, 128, F16, causal=True, packed=4)], ids=str)
def test_packed_kernels_compile_for_hopper(spec):
    stages = build.forward(spec, catalog.HOPPER)[0]
    assert stages.plan.packed == spec.packed
    report = compile.nvrtc(stages.source, catalog.HOPPER.target).report
    assert (report.spill_stores, report.spill_loads) == (0, 0)


def test_spills_are_seen():
    body = "\n".join(f"a[{i}] = x[{i} * n];" for i in range(200))
    rest = "\n".join(f"x[{i} * n] = a[{i}] * a[{i * 7 % 200}];" for i in range(200))
    text = f'extern "C" __global__ void __launch_bounds__(1024, 2) small(float* x, int n) {{ float a[200]; {body}\n'
    report = compile.nvrtc(source(text + f"__syncthreads(); {rest} }}"), "sm_80").report
    assert report.registers == 32 and report.spill_stores > 0 and report.spill_loads > 0 and report.stack > 0


def test_a_compile_error_names_kernel_arch_and_line(folder):
    with pytest.raises(compile.CompileError) as caught:
        compile.nvrtc(source(TEXT.replace("args.n", "args.m")), "sm_80")
    message = str(caught.value)
    assert message.startswith("small for sm_80 does not compile: small.cu(6): error:") and "Args" in message
    assert "\n" not in message and "1 error detected" in caught.value.log
    assert not list(folder.glob("*.cubin")), "a failure was cached"


@pytest.mark.parametrize(
    ("text", "arch", "options", "complaint"),
    [
        (TEXT, "sm_999", (), "invalid value for --gpu-architecture"),
        (TEXT, "sm_80", ("-bogus",), "unrecognized option -bogus"),
        ("#include <vector>\n" + TEXT, "sm_80", (), "could not open source file"),
        (TEXT.replace("small(", "other("), "sm_80", (), 'nothing about a kernel .small.; declare it extern "C"'),
        (TEXT.replace('extern "C"', ""), "sm_80", (), "nothing about a kernel"),
        (TEXT.replace("__syncthreads()", 'asm("bogus;")'), "sm_80", (), "Not a name of any known instruction"),
    ],
    ids=["arch", "option", "foreign header", "other name", "mangled", "ptx"],
)
def test_other_failures_are_one_sentence(text, arch, options, complaint):
    with pytest.raises(compile.CompileError, match=complaint) as caught:
        compile.nvrtc(source(text), arch, options)
    assert str(caught.value).startswith(f"small for {arch}")


def test_ignored_setmaxnreg_is_an_error():
    text = 'extern "C" __global__ void small(int* x) { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); *x = 1; }'
    with pytest.raises(compile.CompileError, match=r"small for sm_90a loses its pipeline: .*C7508.*setmaxnreg"):
        compile.nvrtc(source(text), "sm_90a")


SERIALIZED = """
#define MMA \\
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;" \\
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(desc))
extern "C" __global__ void __launch_bounds__(128, 1) small(float* x, unsigned long long desc) {
    float d[4] = {x[0], x[1], x[2], x[3]};
    asm volatile("wgmma.fence.sync.aligned;");
    MMA;
    d[0] += x[7];
    MMA;
    asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = d[i];
}
"""


def test_serialized_wgmma_is_an_error():
    with pytest.raises(compile.CompileError, match=r"wgmma\.mma_async instructions are serialized"):
        compile.nvrtc(source(SERIALIZED), "sm_90a")


def test_a_damaged_entry_is_compiled_again(folder, caplog):
    first = compile.nvrtc(source(), "sm_80")
    (file,) = folder.glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-10])
    again = compile.nvrtc(source(), "sm_80")
    assert not again.report.cached and len(again.image) == len(first.image) and "damaged" in caplog.text
    assert compile.nvrtc(source(), "sm_80").report.cached


def test_without_a_disk_it_still_compiles(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        assert not compile.nvrtc(source(), "sm_80").report.cached
    assert len(caplog.records) == 1 and "not cached" in caplog.text


def test_an_nvrtc_other_than_the_wheel_has_its_own_key(folder, monkeypatch):
    monkeypatch.setattr(cache, "installed_nvrtc", lambda: "99.1.2")
    first = compile.nvrtc(source(), "sm_80")
    assert re.fullmatch(r"\d+\.\d+", first.report.nvrtc_version) and first.report.nvrtc_version != "99.1"
    assert compile.nvrtc(source(), "sm_80").report.cached
    monkeypatch.setattr(cache, "installed_nvrtc", lambda: None)
    assert compile.nvrtc(source(), "sm_80").report.cached, "one NVRTC, two entries"


def test_many_come_back_in_order():
    work = [(source(TEXT.replace("127 -", f"{i} +")), arch) for i in range(4) for arch in ("sm_80", "sm_120")]
    seen = []
    cubins = compile.compile_many(work, jobs=2, progress=lambda done, total, cubin: seen.append((done, total, cubin)))
    assert [cubin.arch for cubin in cubins] == [arch for _, arch in work]
    assert [row[:2] for row in seen] == [(i + 1, 8) for i in range(8)]
    assert {id(row[2]) for row in seen} == {id(cubin) for cubin in cubins}
    alone = [compile.nvrtc(*pair) for pair in work]
    assert all(one.report.cached and one.image == many.image for one, many in zip(alone, cubins, strict=True))
    assert compile.compile_many([]) == []


def test_many_with_a_bad_one_raises():
    with pytest.raises(compile.CompileError, match="small for sm_80"):
        compile.compile_many([(source(), "sm_80"), (source("bad"), "sm_80"), (source(), "sm_120")], jobs=2)


RACE = """
import logging, sys, time
sys.path.insert(0, "tests/nvrtc")
import cupy, test_compile
from flashgen.runtime import compile
from cupy.cuda import nvrtc
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
print("ready", flush=True)
sys.stdin.readline()
compile.nvrtc(test_compile.source(), "sm_80")
"""


def test_racing_processes_compile_once(folder):
    command = [sys.executable, "-c", RACE]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    racers = [subprocess.Popen(command, **pipe) for _ in range(3)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    output = "".join(racer.communicate()[0] for racer in racers)
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert output.count("compiled small") == 1, output
    assert len(list(folder.glob("*.cubin"))) == 1 and not list(folder.glob(".*"))
