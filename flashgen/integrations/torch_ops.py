"""flashgen's kernels under torch autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from flashgen.api import Kernel


def needs_autograd(*tensors: torch.Tensor) -> bool:
    """True where a gradient will be asked for."""
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def attention(kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> Any:
    """o and lse, both differentiable once."""
    return _Attention.apply(q, k, v, kernel, scale)


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, o and lse: O(seqlen) memory; the backward recomputes the probabilities."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel, scale: float | None
    ) -> Any:
        o, lse = kernel.forward(q, k, v, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.scale = kernel, scale
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(o)
        dq, dk, dv = ctx.kernel.backward(q, k, v, o, lse, dout, dlse, scale=ctx.scale)
        return dq, dk, dv, None, None
