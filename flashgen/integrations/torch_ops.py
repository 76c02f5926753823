"""flashgen's kernels under torch autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from flashgen.runtime.arguments import shown, without_memory

if TYPE_CHECKING:
    from flashgen.runner import Options, Runner

GRADIENTS = ("q", "k", "v", "sinks")  # the arrays whose gradients every backward has


def needs_autograd(*tensors: torch.Tensor) -> bool:
    """True where a gradient will be asked for, or a tangent may come along, which must not be dropped silently."""
    if forward_ad._current_level >= 0:  # unpack_dual would tell as much of each tensor, in ten times the time
        return True
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def attention(kernel: Runner, arrays: dict[str, torch.Tensor], scale: float | None, options: Options) -> Any:
    """o and lse, both differentiable once. Raises ValueError for what autograd would refuse in words of its own.

    arrays: q, k, v and what else the kernel reads, by their names in it.
    """
    kernel.spec.check_differentiable()
    for name, array in arrays.items():
        if name.startswith("mask_") and getattr(array, "requires_grad", False):
            raise ValueError(f"{shown(name)} requires grad, and a mask has no gradient; detach it")
    try:
        return _Attention.apply(kernel, scale, options, tuple(arrays), *arrays.values())
    except NotImplementedError:
        raise ValueError("attention has no forward-mode derivative; use backward() or torch.autograd.grad") from None
    except RuntimeError:
        check_memory({name: arrays[name] for name in "qkv"})
        raise


def check_memory(tensors: dict[str, torch.Tensor]) -> None:
    """ValueError where a tensor stands for others, as under torch.func's transforms."""
    for name, tensor in tensors.items():
        try:
            tensor.data_ptr()
        except RuntimeError:
            raise without_memory(name) from None


class _Attention(torch.autograd.Function):
    """Keeps its inputs, o and lse: O(seqlen) memory beside; the backward recomputes the rest."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Runner, scale: float | None, options: Options, names: tuple[str, ...], *arrays: torch.Tensor
    ) -> Any:
        o, lse = kernel.forward_of(dict(zip(names, arrays, strict=True)), scale, options)
        ctx.save_for_backward(*arrays, o, lse)
        ctx.set_materialize_grads(False)
        ctx.kernel, ctx.scale, ctx.options, ctx.names = kernel, scale, options, names
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        *inputs, o, lse = ctx.saved_tensors
        arrays = dict(zip(ctx.names, inputs, strict=True))
        arrays |= {"o": o, "lse": lse, "dout": torch.zeros_like(o) if dout is None else dout}
        arrays |= {} if dlse is None else {"dlse": dlse}
        needed = zip(ctx.names, ctx.needs_input_grad[4:], strict=True)
        wanted = tuple(name for name, needs in needed if needs and name not in GRADIENTS)
        gradients = ctx.kernel.backward_of(arrays, ctx.scale, ctx.options, wanted)
        return None, None, None, None, *(gradients.get(name) for name in ctx.names)
