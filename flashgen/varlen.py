"""Kernels for packed sequences: a `Kernel` whose calls bring where each sequence begins."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

from flashgen.kernel import Aux, Kernel, traced_by_torch, untraced
from flashgen.runner import PLAIN, Options
from flashgen.runtime import sequences, workspaces
from flashgen.runtime.arguments import check_sizes
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.call import Call
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
        check: bool = False,
    ) -> Any:
        """Attention of each sequence by itself; arguments, types and errors as in `flashgen.varlen_attention`."""
        given = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        if traced_by_torch():
            more: dict[str, Any] = {"scale": scale, "return_lse": return_lse, "seqused_k": seqused_k, "check": check}
            return untraced(self)(*given, max_seqlen_q, max_seqlen_k, mask_aux=mask_aux, score_aux=score_aux, **more)
        sequences.check_longest("max_seqlen_k", max_seqlen_k)
        kernel, arrays = self._given(*given, seqused_k, mask_aux, score_aux)
        options = _hint(max_seqlen_q)
        if check:
            library = library_of(q)
            kernel._bind(library, "forward", arrays, scale, options)  # which refuses what has no values to look at
            sequences.check_values(library, arrays)
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
        mask_aux: Aux = None,
        score_aux: Aux = None,
    ) -> tuple[Any, Any]:
        """o and lse, without autograd."""
        kernel, arrays = self._given(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, mask_aux, score_aux)
        return kernel.forward_of(arrays, scale, _hint(max_seqlen_q))

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
        mask_aux: Aux = None,
        score_aux: Aux = None,
    ) -> tuple[Any, Any, Any]:
        """dq, dk, dv from the forward's inputs and outputs, the gradient of o, and that of lse, None for zero.

        o, dout: (total_q, heads, head_dim_v). lse, dlse: float32 (heads, total_q). The gradients of keys that
        seqused_k leaves out are zero.
        """
        kernel, arrays = self._given(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, mask_aux, score_aux)
        arrays |= {"o": o, "dout": dout, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        return tuple(kernel.backward_of(arrays, scale).values())  # type: ignore[return-value]

    def _given(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_k: Any,
        mask_aux: Aux,
        score_aux: Aux,
    ) -> tuple[VarlenKernel, dict[str, Any]]:
        """The kernel for what a call brings, and its arrays by their names in it."""
        kernel: Any
        kernel, aux, _ = self._with(seqused_k).resolve(mask_aux, score_aux)
        told = dict(zip(sequences.OFFSETS, (cu_seqlens_q, cu_seqlens_k), strict=True))
        told |= {} if seqused_k is None else {sequences.USED: seqused_k}
        return kernel, {"q": q, "k": k, "v": v} | aux | told

    def _bind(
        self, library: Library, stage: str, arrays: dict[str, Any], scale: float | None, options: Options = PLAIN
    ) -> Call:
        call = super()._bind(library, stage, arrays, scale, options)
        if call.launches is None:  # what is on the host anyway is looked at: it would decide what is read
            sequences.check_values(library, arrays)
        return call

    def _with(self, seqused_k: Any) -> VarlenKernel:
        """The kernel of calls that say how many keys are used, or of those that do not."""
        return self if seqused_k is None else self._used

    @cached_property
    def _used(self) -> VarlenKernel:
        retrace = self._retrace
        again = None if retrace is None else lambda *types: replace(retrace(*types), used=True)
        surroundings = (self.arch, self.layout, self.target, self._pinned)
        return type(self)(replace(self.spec, used=True), *surroundings, again)

    def _problem(self, library: Library, arrays: dict[str, Any]) -> sequences.PackedProblem:
        return sequences.check(self.spec, library, arrays)

    def _read(self) -> tuple[str, ...]:
        return (*super()._read(), *sequences.OFFSETS, *((sequences.USED,) if self.spec.used else ()))

    def _lse_shape(self, problem: Any) -> tuple[int, ...]:
        return problem.heads, problem.seqlen_q

    def _shape(self, batch: int, seqlen: int, heads: int, width: int) -> tuple[int, ...]:
        return seqlen, heads, width


def _hint(max_seqlen_q: Any) -> Options:
    """What the longest sequence says of the tiles: where it is not short, that no heads are packed."""
    longest = sequences.check_longest("max_seqlen_q", max_seqlen_q)
    return Options(queries=longest if longest is not None and longest <= FEW else 0)
