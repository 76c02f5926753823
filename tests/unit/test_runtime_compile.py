"""Reading what ptxas says, and refusing a bad arch or option. No GPU, no CuPy."""

import sys
from types import SimpleNamespace

import pytest

from flashgen.runtime import compile

SPILLS = """\
ptxas info    : 0 bytes gmem, 16 bytes cmem[3]
ptxas info    : Compiling entry function 'fwd' for 'sm_80'
ptxas info    : Function properties for fwd
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compile time = 2.677 ms
ptxas info    : Compiling entry function 'fwd_2' for 'sm_80'
ptxas info    : Function properties for fwd_2
ptxas         .     2320 bytes stack frame, 1436 bytes spill stores, 1440 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2320 bytes cumulative stack size, 512 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 147.180 ms
"""
NOT_INLINED = """\
ptxas info    : Function properties for _Z1fPfi
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
"""
# As nvcc and toolkits before 13 print it.
OLDER = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : Function properties for fwd
    0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, 1024 bytes smem, 400 bytes cmem[0], 8 bytes cmem[2]
"""
LOSSES = [
    f"ptxas info    : ({code}) Potential Performance Loss: {what}"
    for code, what in (
        ("C7508", "'setmaxnreg' ignored; unable to determine register count at entry."),
        ("C7510", "wgmma.mma_async instructions are serialized due to non wgmma instructions defining input registers"),
        (
            "C7511",
            "wgmma.mma_async instructions are serialized due to insufficient register resources",
        ),
    )
]


def numbers(log, name):
    found = compile.resources(log, name)
    assert list(found) == ["registers", "spill_stores", "spill_loads", "static_shared", "stack"]
    return tuple(found.values())


def test_a_log_is_read_by_kernel():
    assert numbers(SPILLS, "fwd") == (8, 0, 0, 0, 0)
    assert numbers(SPILLS, "fwd_2") == (255, 1436, 1440, 512, 2320)
    assert numbers(OLDER, "fwd") == (168, 12, 16, 1024, 0)


def test_functions_that_were_not_inlined_count():
    assert numbers(SPILLS + NOT_INLINED, "fwd") == (8, 8, 4, 0, 16)
    assert numbers(SPILLS + NOT_INLINED, "fwd_2") == (255, 1444, 1444, 512, 2320)


@pytest.mark.parametrize(("log", "name"), [("", "fwd"), (SPILLS, "bwd"), (SPILLS, "fw."), (SPILLS[:120], "fwd")])
def test_a_log_without_the_kernel_is_an_error(log, name):
    with pytest.raises(LookupError, match="says nothing"):
        compile.resources(log, name)


def test_a_lost_pipeline_is_found():
    assert compile.losses(SPILLS + OLDER) == []
    assert compile.losses("\n".join([SPILLS, *LOSSES, OLDER])) == LOSSES


@pytest.mark.parametrize("arch", ["", "90", "compute_90", "sm_9", "sm_90b", "sm_90a ", "SM_90"])
def test_a_bad_arch_is_refused(arch):
    with pytest.raises(ValueError, match="sm_80 or sm_90a"):
        compile.nvrtc(SimpleNamespace(name="k", text="", headers=()), arch)


@pytest.mark.parametrize("option", ["-arch=sm_90", "--gpu-architecture=sm_90", "-arch"])
def test_a_second_arch_is_refused(option):
    with pytest.raises(ValueError, match="names an arch"):
        compile.nvrtc(SimpleNamespace(name="k", text="", headers=()), "sm_80", (option,))


def test_without_cupy_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"pip install 'flashgen\[cuda\]'"):
        compile.nvrtc(SimpleNamespace(name="k", text="", headers=()), "sm_80")
