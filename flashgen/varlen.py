"""Kernels for packed sequences: a `Kernel` whose calls bring where each sequence begins."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from flashgen.kernel import Aux, Kernel, traced_by_torch, untraced
from flashgen.runner import Options
from flashgen.runtime import sequences, workspaces
from flashgen.runtime.arguments import check_sizes, values_of
from flashgen.runtime.arrays import Library
from flashgen.spec import check_kernels, parse_integer

# The most queries a sequence for which the length of the longest says something about the tiles: rows of a tile.
FEW = 128


class VarlenKernel(Kernel):
    """Attention of packed sequences for one spec on one chip: `flashgen.compile(..., varlen=True)` makes it."""

    KEPT_CALLS = 256  # the totals may be others in each step of a training, and the same in all of its layers

    def workspace_bytes(  # type: ignore[override]
        self, *, batch: int, total_q: int, heads: int
    ) -> int:
        """The bytes that the backward allocates on a GPU besides dq, dk and dv, and frees when it returns.

            4 * heads * (total_q + rows * (2 + head_dim))    rows: total_q, and a block of queries for each sequence

        Otherwise as of a kernel for sequences of one length.
        """
        given = {"batch": batch, "total_q": total_q, "heads": heads}
        sizes = {name: parse_integer(name, size, "use a whole number") for name, size in given.items()}
        check_sizes(sizes["batch"], sizes["total_q"], 0, sizes["heads"], 1)
        check_kernels(self.spec)
        made = self.programs("backward", self.spec, self.arch)
        block_q = made[1].stages.plan.sizes["block_q"]
        rows = (sizes["total_q"] // block_q + sizes["batch"]) * block_q
        shapes = workspaces.shapes(made, 1, sizes["heads"], rows, rows)
        return 4 * sum(map(math.prod, ((sizes["heads"], sizes["total_q"]), *shapes.values())))

    def __call__(  # type: ignore[override]
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        seqused_k: Any = None,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        sinks: Any = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        dropout_offset: int = 0,
        block_mask: None = None,
        check: bool = False,
    ) -> Any:
        """Attention of each sequence by itself; arguments, types and errors as in `flashgen.varlen_attention`.

        v: None, and only then, of a kernel compiled with shared_kv. sinks and dropout: of a kernel compiled with them,
        as a `Kernel` takes them.
        """
        told = (cu_seqlens_q, cu_seqlens_k)
        given: dict[str, Any] = {"mask_aux": mask_aux, "score_aux": score_aux, "sinks": sinks, "seqused_k": seqused_k}
        given |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
        given["block_mask"] = block_mask
        if traced_by_torch():
            more: dict[str, Any] = {"scale": scale, "return_lse": return_lse, "check": check}
            return untraced(self)(q, k, v, *told, max_seqlen_q, max_seqlen_k, **given, **more)
        sequences.check_longest("max_seqlen_k", max_seqlen_k)
        kernel, read, options = self._given(told, given, max_seqlen_q)
        arrays = {"q": q, "k": k, "v": values_of(self.spec, k, v)} | read
        if check:
            kernel.check_call(arrays, scale, options)
        return kernel.attend(arrays, scale, options, return_lse)

    def forward(  # type: ignore[override]
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_k: Any = None,
        *,
        scale: float | None = None,
        max_seqlen_q: int | None = None,
        **given: Any,
    ) -> tuple[Any, Any]:
        """o and lse, without autograd. given: what a call of the kernel takes beside these, by the same names."""
        told = (cu_seqlens_q, cu_seqlens_k)
        kernel, read, options = self._given(told, {**given, "seqused_k": seqused_k}, max_seqlen_q)
        return kernel.forward_of({"q": q, "k": k, "v": values_of(self.spec, k, v)} | read, scale, options)

    def backward(  # type: ignore[override]
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        dlse: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_k: Any = None,
        *,
        scale: float | None = None,
        aux_grads: Collection[str] = (),
        **given: Any,
    ) -> tuple[Any, ...]:
        """dq, dk, dv (and dsinks) from the forward's inputs and outputs, the gradient of o, and that of lse, None for
        zero.

        o, dout: (total_q, heads, head_dim_v). lse, dlse: float32 (heads, total_q). The gradients of keys that
        seqused_k leaves out are zero. aux_grads: as of a kernel for sequences of one length. given: as the forward was
        given.
        """
        kernel, read, options = self._given((cu_seqlens_q, cu_seqlens_k), {**given, "seqused_k": seqused_k}, None)
        arrays = {"q": q, "k": k, "v": values_of(self.spec, k, v)} | read
        arrays |= {"o": o, "dout": dout, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        *own, found = kernel.gradients(arrays, scale, options, aux_grads)
        return (*own, found) if aux_grads else tuple(own)

    def _given(
        self, told: tuple[Any, Any], given: dict[str, Any], max_seqlen_q: Any
    ) -> tuple[VarlenKernel, dict[str, Any], Options]:
        """The kernel for what a call brings, its arrays but q, k and v by their names in it, and the rest."""
        if given.get("block_mask") is not None:
            raise ValueError(
                "block_mask is of sequences of one length; leave it out of a call with packed ones, whose kernels skip "
                "what mask_mod hides by intervals"
            )
        kernel: Any
        kernel, read, options = self.resolve(**given)
        arrays = dict(zip(sequences.OFFSETS, told, strict=True))
        return kernel, read | arrays, Options(options.drop, options.block_mask, _hint(max_seqlen_q))

    def check_values(self, library: Library, arrays: dict[str, Any]) -> None:
        sequences.check_values(library, arrays)

    def _problem(self, library: Library, arrays: dict[str, Any]) -> sequences.PackedProblem:
        return sequences.check(self.spec, library, arrays)

    def _read(self) -> tuple[str, ...]:
        return (*super()._read(), *sequences.OFFSETS)

    def _lse_shape(self, problem: Any) -> tuple[int, ...]:
        return problem.heads, problem.seqlen_q

    def _shape(self, batch: int, seqlen: int, heads: int, width: int) -> tuple[int, ...]:
        return seqlen, heads, width


def _hint(max_seqlen_q: Any) -> int:
    """What the longest sequence says of the tiles: where it is not short, that no heads are packed."""
    longest = sequences.check_longest("max_seqlen_q", max_seqlen_q)
    return longest if longest is not None and longest <= FEW else 0
