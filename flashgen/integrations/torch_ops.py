"""flashgen's kernels under torch autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from flashgen.runtime.arguments import without_memory

if TYPE_CHECKING:
    from flashgen.kernel import Kernel


def needs_autograd(*tensors: torch.Tensor) -> bool:
    """True where a gradient will be asked for, or a tangent may come along, which must not be dropped silently."""
    if forward_ad._current_level >= 0:  # unpack_dual would tell as much of each tensor, in ten times the time
        return True
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def attention(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    mask_aux: Any,
    score_aux: Any,
    block_mask: Any = None,
) -> Any:
    """o and lse, both differentiable once. Raises ValueError for what autograd would refuse in words of its own."""
    for name, arrays in (("mask_aux", mask_aux or ()), ("score_aux", score_aux or ())):
        for place, array in enumerate(arrays):
            if getattr(array, "requires_grad", False):
                raise ValueError(f"{name}[{place}] requires grad, and gradients are of q, k and v alone; detach it")
    try:
        options = (kernel, scale, block_mask, len(mask_aux or ()))
        return _Attention.apply(q, k, v, *options, *(mask_aux or ()), *(score_aux or ()))
    except NotImplementedError:
        raise ValueError("attention has no forward-mode derivative; use backward() or torch.autograd.grad") from None
    except RuntimeError:
        check_memory({"q": q, "k": k, "v": v})
        raise


def check_memory(tensors: dict[str, torch.Tensor]) -> None:
    """ValueError where a tensor stands for others, as under torch.func's transforms."""
    for name, tensor in tensors.items():
        try:
            tensor.data_ptr()
        except RuntimeError:
            raise without_memory(name) from None


class _Attention(torch.autograd.Function):
    """Keeps q, k, v, o, lse and what functions read: O(seqlen) memory beside; the backward recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kernel: Kernel,
        scale: float | None,
        block_mask: Any,
        masks: int,
        *aux: torch.Tensor,
    ) -> Any:
        read = {"mask_aux": aux[:masks] or None, "score_aux": aux[masks:] or None, "block_mask": block_mask}
        o, lse = kernel.forward(q, k, v, scale=scale, **read)
        ctx.save_for_backward(q, k, v, o, lse, *aux)
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.scale, ctx.block_mask, ctx.masks = kernel, scale, block_mask, masks
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, o, lse, *aux = ctx.saved_tensors
        read = {"mask_aux": aux[: ctx.masks] or None, "score_aux": aux[ctx.masks :] or None}
        read |= {"block_mask": ctx.block_mask}
        if dout is None:
            dout = torch.zeros_like(o)
        dq, dk, dv = ctx.kernel.backward(q, k, v, o, lse, dout, dlse, scale=ctx.scale, **read)
        return dq, dk, dv, None, None, None, None, *(None for _ in aux)
