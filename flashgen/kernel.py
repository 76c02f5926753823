"""A kernel as its users have it: a spec on a chip, its stages to look at, and calls on arrays."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from flashgen.plan.arch import Arch, check_real, for_capability, parse_arch
from flashgen.runner import PLAIN, Options, Runner, programs
from flashgen.runtime import auxiliary, dropping, launch, sink_arrays, workspaces
from flashgen.runtime.arguments import check_sizes
from flashgen.runtime.arrays import library_of
from flashgen.runtime.call import KernelReport
from flashgen.spec import Spec, check_kernels, interpreted, parse_integer

if TYPE_CHECKING:  # the compiler is imported when there is something to compile: it is most of the import time
    from flashgen import build
    from flashgen.plan.plan import Plan
    from flashgen.runtime.blocks import BlockMask

Aux = tuple[Any, ...] | list[Any] | None


class Given(TypedDict, total=False):
    """What a call brings beside q, k and v; `Kernel.__call__` says what each is."""

    mask_aux: Aux
    score_aux: Aux
    sinks: Any
    dropout_p: float | None
    dropout_seed: int | None
    dropout_offset: int
    block_mask: BlockMask | None


@cache
def current_arch() -> Arch:
    """The record of the current GPU, or sm_80 where there is none."""
    if not launch.gpu_available():
        return parse_arch("sm_80")
    return for_capability(*launch.compute_capability(launch.current_device()))


def traced_by_torch() -> bool:
    """True where torch.compile follows this call: it would follow it into the planner and the interpreter."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def untraced(call: Callable) -> Callable:
    """The call as torch.compile leaves it out of its graph."""
    return sys.modules["torch"].compiler.disable(call)


@cache
def _torch_ops() -> Any:
    """The autograd functions, imported once torch's tensors are seen."""
    return importlib.import_module("flashgen.integrations.torch_ops")


def check_block_mask(block_mask: Any) -> None:
    """TypeError for what is none."""
    if not isinstance(getattr(block_mask, "signature", None), tuple):
        kind = type(block_mask).__name__
        raise TypeError(f"block_mask is of type {kind}; give what flashgen.block_mask returned, or None")


@cache
def kernel_for(
    spec: Spec, arch: Arch, layout: str, target: str, pinned: bool, kind: Callable[..., Kernel] | None = None
) -> Kernel:
    return (kind or Kernel)(spec, arch, layout, target, pinned)


class Kernel(Runner):
    """Attention for one spec on one chip. Call it with arrays; look at its stages through its properties."""

    def __init__(
        self,
        spec: Spec,
        arch: Arch,
        layout: str,
        target: str,
        pinned: bool,
        retrace: auxiliary.Retrace | None = None,
    ) -> None:
        """retrace: gives the spec for other types of the arrays that its functions read; None where these are final."""
        super().__init__(spec, arch, layout, target, pinned)
        self._retrace = retrace
        self._reads = bool(spec.arrays) or spec.sinks is not None or spec.dropout
        self._of_types: dict[tuple, Kernel] = {}

    def __repr__(self) -> str:
        return f"<flashgen kernel {self.spec} for {self.arch.name}, {self.layout}>"

    @cached_property
    def _stages(self) -> dict[str, build.Stages]:
        from flashgen import build

        return build.everything(interpreted(self.spec), self.arch)

    @property
    def plan(self) -> Mapping[str, Plan]:
        """The plan of each kernel, by name."""
        return {name: stages.plan for name, stages in self._stages.items()}

    @property
    def ir(self) -> Mapping[str, str]:
        """The TILE text of each kernel, by name."""
        return {name: stages.tile_text for name, stages in self._stages.items()}

    @property
    def machine_ir(self) -> Mapping[str, str]:
        """The MACHINE text of each kernel, by name."""
        return {name: stages.machine_text for name, stages in self._stages.items()}

    @property
    def source(self) -> Mapping[str, str]:
        """The CUDA text of each kernel, by name. Raises ValueError for the made-up chip "toy", and for float64."""
        check_real(self.arch)
        check_kernels(self.spec)
        return {name: stages.source.text for name, stages in self._stages.items()}

    @property
    def report(self) -> Mapping[str, KernelReport]:
        """Registers, spills, shared memory and compile seconds of each kernel, by name; compiles with NVRTC.

        Raises ValueError for the made-up chip "toy", and for float64.
        """
        check_real(self.arch)
        check_kernels(self.spec)
        every = programs("forward", self.spec, self.arch) + programs("backward", self.spec, self.arch)
        return {program.name: KernelReport.of(program) for program in every}

    def explain(self) -> str:
        """Why each plan is what it is: the choice, the ranking, the rejections. A call that packs heads has another."""
        return "\n".join(plan.explain() for plan in self.plan.values())

    def workspace_bytes(
        self, *, batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int | None = None
    ) -> int:
        """The bytes that the backward allocates on a GPU besides dq, dk and dv, and frees when it returns.

        heads_kv: heads where None. All is float32, O(batch * heads * seqlen_q * head_dim) whatever seqlen_k is:

            4 * batch * heads * (seqlen_q + rows * (2 + head_dim))    rows: seqlen_q up to a whole block of queries

        That is: zeros for the gradient of lse, where a call gives none; lse_log2 and delta, which attention_delta
        writes; dq_workspace, to which attention_backward adds dq, with head_dim padded as its plan says. The last does
        not exist where attention_backward_dq makes dq: where deterministic, and on sm_90a with a head dim over 128.
        Sinks take a number more for each 64 queries of a head.
        The forward allocates nothing but its results.

        It holds for arrays with 16-byte aligned rows; others are copied, or take another plan. No GPU is needed, and
        nothing is compiled. Raises ValueError or TypeError for sizes that a call may not have.
        """
        given = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads}
        given["heads_kv"] = heads if heads_kv is None else heads_kv
        sizes = {name: parse_integer(name, size, "use a whole number") for name, size in given.items()}
        check_sizes(**sizes)
        check_kernels(self.spec)
        rows = (sizes["batch"], sizes["heads"], sizes["seqlen_q"])
        shapes = workspaces.shapes(self.programs("backward", self.spec, self.arch), *rows, sizes["seqlen_q"])
        return 4 * sum(map(math.prod, (rows, *shapes.values())))

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        sinks: Any = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        dropout_offset: int = 0,
        block_mask: BlockMask | None = None,
    ) -> Any:
        """Attention; shapes, types and errors as in `flashgen.attention`, in this kernel's layout.

        mask_aux, score_aux: the arrays that mask_mod and score_mod take behind the others: float32, bfloat16,
        float16 or int32, of as many dimensions as they are indexed by, with any strides.
        sinks: of a kernel compiled with them, (heads,), float32 or the storage type: a logit for each head of q that
        takes part in the denominators, differentiable. The LSE counts it in; a query that sees no key has it as LSE.
        dropout_p, dropout_seed, dropout_offset: of a kernel compiled with dropout. The part of the probabilities that
        is dropped, from 0 up to but not 1 (0 is the kernel without dropout); 64 bits and 32 bits that choose which:
        `flashgen.dropout_mask` shows them. The gradients are those of the same choice.
        block_mask: from `flashgen.block_mask`, of this kernel's masks: blocks that it skips are not visited.
        """
        given: Given = {"mask_aux": mask_aux, "score_aux": score_aux, "sinks": sinks}
        given |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
        given["block_mask"] = block_mask
        if traced_by_torch():
            return untraced(self)(q, k, v, scale=scale, return_lse=return_lse, **given)
        kernel, read, options = self.resolve(**given)
        return kernel.attend({"q": q, "k": k, "v": v} | read, scale, options, return_lse)

    def attend(self, arrays: dict[str, Any], scale: float | None, options: Options, return_lse: bool) -> Any:
        """o, with return_lse also lse, of arrays by their names in the kernels; under autograd where torch asks."""
        attend: Callable = self.forward_of
        if library_of(arrays["q"]).name == "torch":
            torch_ops = _torch_ops()
            if torch_ops.needs_autograd(*arrays.values()):
                attend = partial(torch_ops.attention, self)
        o, lse = attend(arrays, scale, options)
        return (o, lse) if return_lse else o

    def forward(self, q: Any, k: Any, v: Any, *, scale: float | None = None, **given: Unpack[Given]) -> tuple[Any, Any]:
        """o and lse, without autograd. given: what a call of the kernel takes beside these, by the same names."""
        kernel, read, options = self.resolve(**given)
        return kernel.forward_of({"q": q, "k": k, "v": v} | read, scale, options)

    def backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        dout: Any,
        dlse: Any = None,
        *,
        scale: float | None = None,
        **given: Unpack[Given],
    ) -> tuple[Any, ...]:
        """dq, dk, dv (and dsinks) from the forward's inputs and outputs, the gradient of o, and optionally that of lse.

        o, dout: (batch, seqlen_q, heads, head_dim_v) in this kernel's layout and type. lse, dlse: float32
        (batch, heads, seqlen_q), dlse None for zero. Where a kernel cannot read one of these in place it is copied.
        given: as the forward was given.
        dsinks: (heads,), of the type of the sinks, summed in float32 in a fixed order.
        """
        kernel, read, options = self.resolve(**given)
        arrays = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse} | read
        arrays |= {} if dlse is None else {"dlse": dlse}
        return tuple(kernel.backward_of(arrays, scale, options).values())

    def resolve(
        self,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        sinks: Any = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        dropout_offset: int = 0,
        block_mask: BlockMask | None = None,
    ) -> tuple[Kernel, dict[str, Any], Options]:
        """What runs a call that brings these: the kernel for their types, the arrays by their names in it, the rest.

        One object for each spec. Where nothing is dropped it is one without dropout.
        """
        if not self._reads and mask_aux is score_aux is sinks is dropout_p is dropout_seed is block_mask is None:
            return self, {}, PLAIN
        arrays = auxiliary.named(self.spec, mask_aux, score_aux)
        of_sinks = sink_arrays.dtype(self.spec, sinks)
        arrays |= {} if sinks is None else {"sinks": sinks}
        drop = dropping.asked(self.spec, dropout_p, dropout_seed, dropout_offset)
        types = auxiliary.dtypes("mask_aux", mask_aux), auxiliary.dtypes("score_aux", score_aux)
        if block_mask is not None:
            check_block_mask(block_mask)
        kernel = self._of((*types, of_sinks, drop is not None, block_mask is not None))
        return kernel, arrays, Options(drop, block_mask)

    def _of(self, types: tuple[Any, Any, Any, bool, bool]) -> Kernel:
        """The kernel for arrays of mask and score functions and sinks of these types, with or without dropout and
        lists of blocks."""
        *functions, sinks, drops, listed = types
        if self._retrace is None and (sinks, drops, listed) == (self.spec.sinks, self.spec.dropout, self.spec.listed):
            return self
        kernel = self._of_types.get(types)
        if kernel is None:
            spec = auxiliary.concrete(self.spec, self._retrace, tuple(functions)) if self._retrace else self.spec
            spec = replace(spec, sinks=sinks, dropout=drops, listed=listed)
            kind: Any = type(self)
            kernel = kernel_for(spec, self.arch, self.layout, self.target, self._pinned, kind)
            self._of_types[types] = kernel
        return kernel
