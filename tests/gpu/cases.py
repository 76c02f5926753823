"""What the GPU tests share: a hashable name for the options of flashgen.compile, the grid, and inputs on the GPU."""

from typing import NamedTuple

import support
import torch

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (16, 32, 40, 64, 80, 96, 128, 160, 192, 256)
LENGTHS = (
    (1, 1),
    (64, 128),
    (113, 203),
    (108, 256),
    (256, 512),
    (512, 256),
    (239, 1),
    (1024, 1024),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
    (4224, 4224),
)
# (heads_q, heads_kv) at short and at long lengths
HEADS = {"mha": ((3, 3), (2, 2)), "gqa": ((6, 2), (4, 2)), "mqa": ((4, 1), (3, 1))}


class Spec(NamedTuple):
    """Options of flashgen.compile; as a parameter named `spec` of a test it is compiled before the first test runs."""

    head_dim: int
    causal: bool = False
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    layout: str = "bshd"
    deterministic: bool = False
    arch: str | None = None

    def options(self):
        return self._asdict()

    def __str__(self):
        shown = [self.dtype, f"d{self.head_dim}" + (f"-{self.head_dim_v}" if self.head_dim_v else "")]
        shown.append("causal" if self.causal else "full")
        shown += [self.layout] * (self.layout != "bshd") + ["deterministic"] * self.deterministic
        shown += [self.arch] * (self.arch is not None)
        return "-".join(shown)


def inputs(spec, batch, seqlen_q, seqlen_k, heads_q, heads_kv, seed=0):
    """Normal (q, k, v, do) on the GPU, contiguous BSHD whatever the layout of the spec."""
    dtype = getattr(torch, spec.dtype)
    dims = (batch, seqlen_q, seqlen_k, heads_q, heads_kv, spec.head_dim, spec.head_dim_v)
    return support.random_inputs(*dims, dtype=dtype, device="cuda", seed=seed)


def attend(kernel, **options):
    """q, k, v -> (o, lse) by the kernel."""
    return lambda q, k, v: kernel(q, k, v, return_lse=True, **options)


def differing(kernel, arrays, first, repeats=1000):
    """The gradients in which some backward differs from the first, in memory that is poisoned now and then."""
    q, k, v, do = arrays
    found = set()
    for number in range(repeats):
        if number % 50 == 0:
            support.poison(*arrays)
        again = kernel.backward(q, k, v, first.o, first.lse, do)
        for name, gradient in zip(("dq", "dk", "dv"), again, strict=True):
            if not torch.equal(gradient, getattr(first, name)):
                found.add(name)
    return found


def report(found):
    """Fails with every sentence of a list."""
    assert not found, f"{len(found)} failures\n" + "\n".join(found)
