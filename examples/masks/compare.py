"""What each example here does as a script: attention with its options beside dense attention in float64."""

import torch

import flashgen
from flashgen.interp import reference


def with_dense(options, queries=96, keys=96, heads=4):
    """Runs forward and backward, on the GPU where there is one, and prints the largest errors."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kernel = flashgen.compile(64, **{"causal": False} | options)
    shapes = [(1, queries, heads, 64), (1, keys, 2, 64), (1, keys, 2, 64)]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16().to(device).requires_grad_() for shape in shapes]
    o = kernel(*inputs)
    do = torch.randn_like(o)
    found = [o.detach(), *torch.autograd.grad(o, inputs, do)]

    arrays = [x.detach().double().cpu().numpy() for x in (*inputs, do)]
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    expected = [reference.forward(*arrays[:3], **functions)[0], *reference.backward(*arrays, **functions)]
    errors = [float(abs(x.double().cpu().numpy() - y).max()) for x, y in zip(found, expected, strict=True)]
    sizes = [1.0 + float(abs(y).max()) for y in expected]
    shown = ", ".join(f"{name} {error:.4f}" for name, error in zip(("o", "dq", "dk", "dv"), errors, strict=True))
    print(f"{kernel.spec} on the {device}: largest errors {shown}")
    if not all(error <= 0.03 * size for error, size in zip(errors, sizes, strict=True)):
        raise SystemExit("that is more than bfloat16 accounts for")
