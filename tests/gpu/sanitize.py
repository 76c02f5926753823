"""A few forwards and backwards for compute-sanitizer, checked against dense attention on the CPU. Not a pytest file.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py --every-lane

The exit status is not 0 when a result is wrong. With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation
of its own, so that memcheck sees a read one element past its end.

Where one lane arrives at an mbarrier for its warp, behind `__syncwarp`, racecheck takes the other lanes' accesses to
shared memory for races (50 reports in the backward). With --every-lane all 32 arrive, which is slower and otherwise the
same: then it follows, and reports nothing.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import support  # noqa: E402
import torch  # noqa: E402
from cases import Spec, attend  # noqa: E402

import flashgen  # noqa: E402
from flashgen import build  # noqa: E402

SPECS = [
    Spec(64, causal=True),
    Spec(128, causal=True, dtype="float16"),
    Spec(256, causal=True),
    Spec(40, head_dim_v=24),
    Spec(64, causal=True, deterministic=True),
    Spec(128, deterministic=True),
    Spec(192, head_dim_v=128, causal=True),
]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    SPECS += [Spec(d, causal=True, arch="sm_90") for d in (64, 128, 256)]
LENGTHS = [(113, 203), (203, 113), (1, 70), (128, 128)]


def run(spec, lengths):
    """Sentences on what is wrong. Only flashgen's kernels and torch's copies run on the GPU."""
    kernel = flashgen.compile(**spec.options())
    arrays = [x.cuda() for x in cpu_inputs(spec, lengths)]
    leaves = [x.requires_grad_() for x in arrays[:3]]
    o, lse = attend(kernel)(*leaves)
    gradients = torch.autograd.grad(o, leaves, arrays[3])
    torch.cuda.synchronize()
    result = support.Result(*(x.detach().cpu() for x in (o, lse, *gradients)))
    return support.judge(result, *(x.detach().cpu() for x in arrays), causal=spec.causal)


def cpu_inputs(spec, lengths):
    dims = (1, *lengths, 4, 2, spec.head_dim, spec.head_dim_v)
    return support.random_inputs(*dims, dtype=getattr(torch, spec.dtype), device="cpu")


def let_every_lane_arrive():
    """Kernels whose warps arrive with 32 lanes, at barriers that count them."""
    finish = build._finish

    def changed(kernel, plan, spec):
        stages = finish(kernel, plan, spec)
        text = stages.source.text.replace("arrive_warp(", "arrive(")
        if text == stages.source.text:
            return stages
        counts = r"(init_barriers<\d+>\(\w+, )(?!1\))(\d+)\)"  # but for those at which one thread arrives
        text = re.sub(counts, lambda found: f"{found[1]}{32 * int(found[2])})", text)
        return replace(stages, emitted=replace(stages.source, text=text))

    build._finish = changed


def main():
    if "--every-lane" in sys.argv[1:]:
        let_every_lane_arrive()
    wrong = 0
    for spec in SPECS:
        for lengths in LENGTHS:
            found = run(spec, lengths)
            wrong += bool(found)
            print(f"{spec} {lengths}: {'; '.join(found) or 'right'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
