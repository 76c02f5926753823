"""Kernel.workspace_bytes, by hand. What a backward allocates is in tests/gpu/test_gpu_runtime.py."""

import math
import subprocess
import sys

import numpy as np
import pytest

import flashgen
from flashgen.kernel import Kernel
from flashgen.plan.arch import parse_arch
from flashgen.runtime import launch
from flashgen.runtime.arrays import LIBRARIES

WHOLE = 2**8 * 3 * 5 * 7  # queries in whole blocks, whatever the plan's block_q is
ROWS = 2 * 6 * WHOLE
SIZES = {"batch": 2, "seqlen_q": WHOLE, "seqlen_k": 1000, "heads": 6, "heads_kv": 2}
# What a query has: a zero for the gradient of lse, lse_log2, delta; and a row of dq where attention_backward adds dq.
VECTORS = 3
CASES = [
    ("sm_80", 64, {}, VECTORS + 64),
    ("sm_80", 128, {"causal": False, "dtype": "float16"}, VECTORS + 128),
    ("sm_80", 128, {"deterministic": True}, VECTORS),
    ("sm_80", 256, {}, VECTORS + 256),
    ("sm_80", 40, {"head_dim_v": 64}, VECTORS + 48),  # padded to whole matrix instructions
    ("sm_90a", 64, {"layout": "bhsd"}, VECTORS + 64),
    ("sm_90a", 128, {}, VECTORS + 128),
    ("sm_90a", 128, {"deterministic": True}, VECTORS),
    ("sm_90a", 256, {}, VECTORS),  # over 128, dq has a kernel of its own
    ("sm_90", 256, {}, VECTORS + 256),  # but not with the portable kernels
]


@pytest.mark.parametrize(("arch", "head_dim", "options", "floats"), CASES)
def test_by_hand(arch, head_dim, options, floats):
    kernel = flashgen.compile(head_dim, arch=arch, **options)
    assert kernel.workspace_bytes(**SIZES) == 4 * ROWS * floats


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 64), ("sm_90a", 128), ("sm_90a", 256)])
def test_it_is_linear_in_whole_blocks_of_seqlen_q_whatever_seqlen_k_is(arch, head_dim):
    kernel = flashgen.compile(head_dim, arch=arch)
    one = kernel.workspace_bytes(**SIZES)
    for times in (0, 2, 3, 16):
        assert kernel.workspace_bytes(**SIZES | {"seqlen_q": times * WHOLE, "seqlen_k": times}) == times * one


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_last_block_that_is_not_full_counts_whole(deterministic):
    kernel = flashgen.compile(64, arch="sm_80", deterministic=deterministic)
    block_q = kernel.plan["attention_backward"].sizes["block_q"]
    for seqlen_q, blocks in ((1, 1), (block_q, 1), (block_q + 1, 2)):
        floats = seqlen_q + blocks * block_q * (2 + (0 if deterministic else 64))
        assert kernel.workspace_bytes(batch=3, seqlen_q=seqlen_q, seqlen_k=5, heads=4) == 4 * 3 * 4 * floats


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize(("head_dim", "seqlen_k"), [(64, 70), (256, 70), (128, 70), (128, 4096), (128, 4097)])
def test_it_counts_what_a_call_allocates(arch, head_dim, seqlen_k, monkeypatch):
    """NumPy arrays pass for arrays of a GPU, and the call is bound, but not launched."""
    numpy = LIBRARIES["numpy"]
    monkeypatch.setattr(type(numpy), "device", lambda self, x: 0)
    monkeypatch.setattr(launch, "compute_capability", lambda device: parse_arch(arch).capability)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 108)
    spec = flashgen.compile(head_dim, dtype="float16", causal=True).spec
    kernel = Kernel(spec, parse_arch(arch), "bshd", "auto", True)
    q, k, v = (np.zeros((2, n, heads, head_dim), np.float16) for n, heads in ((100, 6), (seqlen_k, 2), (seqlen_k, 2)))
    lse = np.zeros((2, 6, 100), np.float32)
    call = kernel._bind(numpy, "backward", {"q": q, "k": k, "v": v, "o": q, "dout": q, "lse": lse}, None)
    allocated = lse.nbytes + sum(4 * math.prod(shape) for shape in call.workspaces.values())
    assert kernel.workspace_bytes(batch=2, seqlen_q=100, seqlen_k=seqlen_k, heads=6, heads_kv=2) == allocated
    if (arch, head_dim) == ("sm_90a", 128):  # the backward's tile by the number of keys
        block_q = call.launches[1].program.stages.plan.sizes["block_q"]
        assert block_q == (64 if seqlen_k <= 4096 else 80)


def test_any_integers_give_a_python_int():
    kernel = flashgen.compile(64, arch="sm_80")
    found = kernel.workspace_bytes(**{name: np.int32(size) for name, size in SIZES.items()} | {"batch": 1 << 20})
    assert type(found) is int and found == (1 << 19) * kernel.workspace_bytes(**SIZES) > 1 << 31


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("torch", "cupy", "cuda")))  # importing any of them now fails
import flashgen
print(flashgen.compile(128, arch="sm_90a").workspace_bytes(batch=1, seqlen_q=128, seqlen_k=128, heads=1))
"""


def test_it_needs_neither_a_gpu_nor_a_compiler():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert run.stdout.split() == [str(4 * 128 * (VECTORS + 128))], run.stderr[-1000:]
