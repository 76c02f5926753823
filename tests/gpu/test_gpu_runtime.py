"""Repeatability, streams, CuPy, the cost of a launch, the cache, and torch's own attention as a second opinion."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import Spec, attend, differing, inputs, report  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("lengths", [(4224, 4224), (2000, 4000)])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128, causal=True)], ids=str)
def test_forward_repeats_bit_for_bit(kernel, spec, lengths):
    q, k, v, _ = inputs(spec, 1, *lengths, 4, 2)
    first, first_lse = kernel(q, k, v, return_lse=True)
    assert bool(torch.isfinite(first).all())
    for i in range(100):
        support.poison(q)
        o, lse = kernel(q, k, v, return_lse=True)
        assert torch.equal(o, first) and torch.equal(lse, first_lse), f"repeat {i} differs"


@pytest.mark.parametrize(
    "spec",
    [Spec(d, causal, deterministic=True) for d in (64, 128, 192, 256) for causal in (False, True)],
    ids=str,
)
def test_deterministic_backward_repeats_bit_for_bit(kernel, spec):
    arrays = inputs(spec, 2, 1023, 1024, 6, 2)
    first = support.evaluate(attend(kernel), *arrays)
    report(support.judge(first, *arrays, causal=spec.causal))
    assert not differing(kernel, arrays, first)


@pytest.mark.parametrize("lengths", [(1, 1), (113, 203), (512, 256), (2048, 2048)])
@pytest.mark.parametrize(
    "spec", [Spec(d, causal, deterministic=True) for d, causal in ((64, True), (128, False), (256, True))], ids=str
)
def test_deterministic_is_right(kernel, spec, lengths):
    arrays = inputs(spec, 1, *lengths, 4, 2)
    report(support.failures(attend(kernel), *arrays, causal=spec.causal))


@pytest.mark.parametrize("given", ["o alone", "o and lse"])
@pytest.mark.parametrize(
    "spec",
    [Spec(64, causal=True), Spec(40), Spec(128, causal=True, deterministic=True), Spec(256, causal=True)],
    ids=str,
)
def test_workspace_bytes_are_what_a_backward_allocates(kernel, spec, given):
    """As torch's allocator was asked for them, before it rounds. The gradient of lse is zeros where none is given."""
    sizes = {"batch": 2, "seqlen_q": 1000, "seqlen_k": 700, "heads": 6, "heads_kv": 2}
    q, k, v, do = inputs(spec, *sizes.values())
    o, lse = kernel.forward(q, k, v)
    dlse = torch.randn_like(lse) if given == "o and lse" else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    gradients = kernel.backward(q, k, v, o, lse, do, dlse)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    saved = 0 if dlse is None else dlse.nbytes
    assert peak - before - sum(x.nbytes for x in gradients) == kernel.workspace_bytes(**sizes) - saved


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_the_current_stream_is_used(kernel, spec):
    """The inputs become right late, on a side stream: a kernel on any other stream would read NaN."""
    arrays = inputs(spec, 2, 113, 203, 4, 2)
    late = [torch.full_like(x, float("nan")) for x in arrays]
    kernel(*arrays[:3])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for x, right in zip(late, arrays, strict=True):
            x.copy_(right)
        leaves = [x.detach().requires_grad_() for x in late[:3]]
        o, lse = kernel(*leaves, return_lse=True)
        gradients = torch.autograd.grad(o, leaves, late[3])
    torch.cuda.synchronize()
    report(support.judge(support.Result(o.detach(), lse.detach(), *gradients), *arrays, causal=True))


@pytest.mark.parametrize("spec", [Spec(64, causal=True)], ids=str)
def test_the_device_of_the_tensors_is_used(kernel, spec):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    arrays = [x.to("cuda:1") for x in inputs(spec, 2, 113, 203, 4, 2)]
    report(support.failures(attend(kernel), *arrays, causal=True))


@pytest.mark.parametrize("spec", [Spec(64, causal=True, dtype="float16"), Spec(40, dtype="float16")], ids=str)
def test_cupy_in_cupy_out(kernel, spec):
    cupy = pytest.importorskip("cupy")
    q, k, v, _ = inputs(spec, 2, 113, 203, 4, 2)
    want, want_lse = kernel(q, k, v, return_lse=True)
    o, lse = kernel(*(cupy.from_dlpack(x) for x in (q, k, v)), return_lse=True)
    assert isinstance(o, cupy.ndarray) and o.dtype == cupy.float16 and o.shape == q.shape
    assert isinstance(lse, cupy.ndarray) and lse.dtype == cupy.float32
    assert torch.equal(torch.from_dlpack(o), want) and torch.equal(torch.from_dlpack(lse), want_lse)
    alone = kernel(*(cupy.from_dlpack(x) for x in (q, k, v)))
    assert isinstance(alone, cupy.ndarray) and bool((alone == o).all())


@pytest.mark.parametrize("spec", [Spec(64, dtype="float16")], ids=str)
def test_cupy_strides_and_stream(kernel, spec):
    """A transposed CuPy array, on a CuPy stream that fills it late."""
    cupy = pytest.importorskip("cupy")
    q, k, v, _ = inputs(spec, 2, 113, 203, 4, 2)
    want = kernel(q, k, v)
    arrays = [cupy.ascontiguousarray(cupy.from_dlpack(x).swapaxes(1, 2)) for x in (q, k, v)]
    late = [cupy.full_like(x, cupy.nan) for x in arrays]
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)), stream:
        torch.cuda._sleep(100_000_000)
        for x, right in zip(late, arrays, strict=True):
            x[...] = right
        o = kernel(*(x.swapaxes(1, 2) for x in late))
    stream.synchronize()
    assert torch.equal(torch.from_dlpack(o), want)


@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128)], ids=str)
def test_launch_costs_under_25_microseconds(kernel, spec):
    q, k, v, _ = inputs(spec, 1, 64, 64, 2, 2)
    calls, best = 200, float("inf")
    with torch.no_grad():
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                kernel(q, k, v)
            best = min(best, (time.perf_counter() - start) / calls)
    print(f"{spec}: {best * 1e6:.1f} us a launch")
    assert best < 25e-6, f"{best * 1e6:.1f} us"


LENGTHS_VARY = """
import os
from pathlib import Path
import torch, flashgen

def files():
    found = Path(os.environ["FLASHGEN_CACHE_DIR"]).rglob("*")
    return sorted(str(p) for p in found if p.is_file() and p.suffix != ".lock")

def run(kernel, seqlen_q, seqlen_k, dim, heads_kv=2):
    q = torch.randn(1, seqlen_q, 2, dim, device="cuda").half().requires_grad_()
    k, v = (torch.randn(1, seqlen_k, heads_kv, dim, device="cuda").half().requires_grad_() for _ in range(2))
    kernel(q, k, v).sum().backward()
    torch.cuda.synchronize()

kernel = flashgen.compile(16, True, dtype="float16")
for lengths in ((64, 64), (100, 90), (128, 256), (256, 256), (512, 512)):
    run(kernel, *lengths, 16)
run(kernel, 1, 400, 16, heads_kv=1)  # few queries of grouped heads have a kernel of their own
before = files()
for n in range(1, 400, 13):
    run(kernel, n, 401 - n, 16, heads_kv=1 + n % 2)
after = files()
print(len(before), len(after), before == after)
"""


def test_nothing_is_recompiled_because_a_length_changed(tmp_path):
    environment = os.environ | {"FLASHGEN_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LENGTHS_VARY]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    before, after, same = run.stdout.split()
    assert int(before) > 0, "nothing was written to FLASHGEN_CACHE_DIR, so the check would see nothing"
    assert same == "True", f"{before} files in the cache became {after}"


WARM = """
import gc, time, torch, flashgen
q = torch.randn(1, 64, 2, 16, device="cuda").half()
flashgen.compile(16, True, dtype="float16")(q, q, q)  # imports, CUDA context
torch.cuda.synchronize()
gc.collect()  # a pass over the 200 000 objects of torch and CuPy takes 170 ms, and would come at any time from here on
start = time.perf_counter()
flashgen.compile(16, False, dtype="float16")(q, q, q)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_a_warm_start_takes_under_50_ms(tmp_path):
    """The second process finds both kernels on disk; the second kernel of that process is timed."""
    environment = os.environ | {"FLASHGEN_CACHE_DIR": str(tmp_path)}
    seconds = []
    for _ in range(3):
        command = [sys.executable, "-c", WARM]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-2000:]
        seconds.append(float(run.stdout))
    print(f"cold {seconds[0] * 1e3:.0f} ms, warm {seconds[1] * 1e3:.0f} and {seconds[2] * 1e3:.0f} ms")
    assert min(seconds[1:]) < 0.050, seconds


def sdpa(q, k, v, do, causal):
    """torch's attention with its gradients, in BSHD; the LSE is not part of it."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped)
    gradients = torch.autograd.grad(o, leaves, do.transpose(1, 2))
    o, dq, dk, dv = (x.detach().transpose(1, 2) for x in (o, *gradients))
    return support.Result(o, None, dq, dk, dv)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("spec", [Spec(64, causal=True), Spec(128), Spec(128, causal=True, dtype="float16")], ids=str)
def test_no_worse_than_sdpa(kernel, spec, heads):
    """The rule once more, with torch's own kernel in the place of the dense low-precision formula."""
    arrays = inputs(spec, 2, 1000, 1000, *heads)
    result = support.evaluate(attend(kernel), *arrays)
    report(support.judge(result, *arrays, causal=spec.causal, low=sdpa(*arrays, spec.causal)))
