"""A kernel as its users have it: a spec on a chip, its stages to look at, and calls on arrays."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from flashgen.plan.arch import Arch, check_real, for_capability, parse_arch
from flashgen.runner import PLAIN, Options, Runner, programs
from flashgen.runtime import auxiliary, dropping, launch, sink_arrays, workspaces
from flashgen.runtime.arguments import check_sizes, values_of
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
    bias: Any
    alibi_slopes: Any
    sinks: Any
    dropout_p: float | None
    dropout_seed: int | None
    dropout_offset: int
    block_mask: BlockMask | None
    seqused_k: Any


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
        stages = ("forward", "backward") if self.spec.differentiable else ("forward",)
        every = [program for stage in stages for program in programs(stage, self.spec, self.arch)]
        return {program.name: KernelReport.of(program) for program in every}

    def explain(self) -> str:
        """Why each plan is what it is: the choice, the ranking, the rejections. A call that packs heads has another."""
        return "\n".join(plan.explain() for plan in self.plan.values())

    def workspace_bytes(
        self, *, batch: int, seqlen_q: int, seqlen_k: int, heads: int, heads_kv: int | None = None
    ) -> int:
        """The bytes that the backward allocates on a GPU besides dq, dk and dv, and frees when it returns.

        heads_kv: heads where None. All is float32, O(batch * heads * seqlen_q * head_dim):

            4 * batch * heads * (seqlen_q + rows * (2 + head_dim))    rows: seqlen_q up to a whole block of queries

        How many queries a block has may depend on seqlen_k (`explain` shows for which calls).
        That is: zeros for the gradient of lse, where a call gives none; lse_log2 and delta, which attention_delta
        writes; dq_workspace, to which attention_backward adds dq, with head_dim padded as its plan says. The last does
        not exist where attention_backward_dq makes dq: where deterministic, and on sm_90a with a head dim over 128.
        Sinks take a number more for each 64 queries of a head.
        The forward allocates nothing but its results. Gradients of arrays that the score function reads take more: a
        float32 array like each, or (batch, heads, rows) sums, rows being queries or keys; deterministic ones may take
        these, and an int64 array like each.

        It holds for arrays with 16-byte aligned rows; others are copied, or take another plan. No GPU is needed, and
        nothing is compiled. Raises ValueError or TypeError for sizes that a call may not have, and where there is no
        backward.
        """
        from flashgen import build

        given = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads}
        given["heads_kv"] = heads if heads_kv is None else heads_kv
        sizes = {name: parse_integer(name, size, "use a whole number") for name, size in given.items()}
        check_sizes(**sizes)
        check_kernels(self.spec)
        rows = (sizes["batch"], sizes["heads"], sizes["seqlen_q"])
        spec = build.backward_for_sizes(self.spec, self.arch, sizes["seqlen_k"])
        shapes = workspaces.shapes(self.programs("backward", spec, self.arch), *rows, sizes["seqlen_q"])
        return 4 * sum(map(math.prod, (rows, *shapes.values())))

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any = None,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        dropout_offset: int = 0,
        block_mask: BlockMask | None = None,
        seqused_k: Any = None,
        check: bool = False,
    ) -> Any:
        """Attention; shapes, types and errors as in `flashgen.attention`, in this kernel's layout.

        v: left out, and only then, of a kernel compiled with shared_kv: it is k[..., :head_dim_v].
        mask_aux, score_aux: the arrays that mask_mod and score_mod take behind the others: float32, bfloat16,
        float16 or int32, of as many dimensions as they are indexed by, with any strides.
        bias: of a kernel with bias=True, (batch, heads, seqlen_q, seqlen_k), each of them whole or 1; missing leading
        axes count as 1. alibi_slopes: of one with alibi=True, float32 (heads,) or (batch, heads).
        With torch all floating-point arrays that score_mod reads, bias and alibi_slopes get gradients.
        sinks: of a kernel compiled with them, (heads,), float32 or the storage type: a logit for each head of q that
        takes part in the denominators, differentiable. The LSE counts it in; a query that sees no key has it as LSE.
        dropout_p, dropout_seed, dropout_offset: of a kernel compiled with dropout. The part of the probabilities that
        is dropped, from 0 up to but not 1 (0 is the kernel without dropout); 64 bits and 32 bits that choose which:
        `flashgen.dropout_mask` shows them. The gradients are those of the same choice.
        block_mask: from `flashgen.block_mask`, of this kernel's masks: blocks that it skips are not visited.
        seqused_k: int32 (batch,), the keys of each batch that are used, from 0 to seqlen_k: a padded batch. The others
        are not read, whatever they are, and have zero gradients; their blocks are not visited. causal and windows are
        aligned with those that are used, and flashgen.seqlen_k is their number. The kernel for it is another.
        check: look at values too, for which this waits for the device: that seqused_k is in range, and that functions
        read within their arrays. On the CPU the former is looked at in any case. Unchecked, more keys than there are
        count as all, fewer than none as none, and an index out of range reads the last of its axis.
        """
        given: Given = {"mask_aux": mask_aux, "score_aux": score_aux, "sinks": sinks}
        given |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "dropout_offset": dropout_offset}
        given |= {"bias": bias, "alibi_slopes": alibi_slopes, "block_mask": block_mask, "seqused_k": seqused_k}
        if traced_by_torch():
            return untraced(self)(q, k, v, scale=scale, return_lse=return_lse, check=check, **given)
        kernel, read, options = self.resolve(**given)
        if v is None or self.spec.shared_kv:
            v = values_of(self.spec, k, v)
        arrays = {"q": q, "k": k, "v": v} | read
        if check:
            kernel.check_call(arrays, scale, options)
        return kernel.attend(arrays, scale, options, return_lse)

    def check_call(self, arrays: dict[str, Any], scale: float | None, options: Options) -> None:
        """ValueError for values that no call may have, and for functions that read outside of an array.

        It waits for the device.
        """
        library = library_of(arrays["q"])
        call = self._bind(library, "forward", arrays, scale, options)  # which refuses what has no values to look at
        self.check_values(library, arrays)
        if self.spec.arrays:
            from flashgen.checks import check_reads

            check_reads(self.spec, call.problem, library, arrays, call.launches is not None)

    def attend(self, arrays: dict[str, Any], scale: float | None, options: Options, return_lse: bool) -> Any:
        """o, with return_lse also lse, of arrays by their names in the kernels; under autograd where torch asks."""
        attend: Callable = self.forward_of
        if library_of(arrays["q"]).name == "torch":
            torch_ops = _torch_ops()
            if torch_ops.needs_autograd(*arrays.values()):
                attend = partial(torch_ops.attention, self)
        o, lse = attend(arrays, scale, options)
        return (o, lse) if return_lse else o

    def forward(
        self, q: Any, k: Any, v: Any = None, *, scale: float | None = None, **given: Unpack[Given]
    ) -> tuple[Any, Any]:
        """o and lse, without autograd. given: what a call of the kernel takes beside these, by the same names."""
        kernel, read, options = self.resolve(**given)
        return kernel.forward_of({"q": q, "k": k, "v": values_of(self.spec, k, v)} | read, scale, options)

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
        aux_grads: Collection[str] = (),
        **given: Unpack[Given],
    ) -> tuple[Any, ...]:
        """dq, dk, dv (and dsinks) from the forward's inputs and outputs, the gradient of o, and optionally that of lse.

        o, dout: (batch, seqlen_q, heads, head_dim_v) in this kernel's layout and type. lse, dlse: float32
        (batch, heads, seqlen_q), dlse None for zero. Where a kernel cannot read one of these in place it is copied.
        given: as the forward was given.
        dsinks: (heads,), of the type of the sinks, summed in float32 in a fixed order.
        aux_grads: arrays of which gradients are wanted too, as "bias", "alibi_slopes" or "score_aux[0]". The last
        result is then a dict by these words, each gradient like its array in shape and type.
        """
        kernel, read, options = self.resolve(**given)
        arrays = {"q": q, "k": k, "v": v, "o": o, "dout": dout, "lse": lse} | read
        arrays |= {} if dlse is None else {"dlse": dlse}
        *own, found = kernel.gradients(arrays, scale, options, aux_grads)
        for word in found.keys() & auxiliary.BUILT_IN.keys():  # which may have fewer axes than a kernel reads
            found[word] = found[word].reshape(given[word].shape)  # type: ignore[literal-required]
        return (*own, found) if aux_grads else tuple(own)

    def gradients(
        self, arrays: dict[str, Any], scale: float | None, options: Options, aux_grads: Collection[str]
    ) -> tuple[Any, ...]:
        """Those of q, k, v, and of sinks where they are among the arrays; and a dict of others, by these words."""
        names = {word: auxiliary.differentiable(self.spec, word) for word in aux_grads}
        found = self.backward_of(arrays, scale, options, tuple(names.values()))
        of_arrays = {word: found.pop(name) for word, name in names.items()}
        return (*found.values(), of_arrays)

    def resolve(
        self,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        dropout_p: float | None = None,
        dropout_seed: int | None = None,
        dropout_offset: int = 0,
        block_mask: BlockMask | None = None,
        seqused_k: Any = None,
    ) -> tuple[Kernel, dict[str, Any], Options]:
        """What runs a call that brings these: the kernel for their types, the arrays by their names in it, the rest.

        One object for each spec. Where nothing is dropped it is one without dropout.
        """
        without = mask_aux is score_aux is bias is alibi_slopes is sinks is dropout_p is block_mask is seqused_k is None
        if without and dropout_seed is None and not self._reads:
            return self, {}, PLAIN
        arrays = auxiliary.named(self.spec, mask_aux, score_aux, bias, alibi_slopes)
        types = auxiliary.dtypes(self.spec, arrays) if self._retrace else (None, None)
        of_sinks = sink_arrays.dtype(self.spec, sinks)
        arrays |= {} if sinks is None else {"sinks": sinks}
        arrays |= {} if seqused_k is None else {"seqused_k": seqused_k}
        drop = dropping.asked(self.spec, dropout_p, dropout_seed, dropout_offset)
        if block_mask is not None:
            check_block_mask(block_mask)
        kernel = self._of((*types, of_sinks, drop is not None, block_mask is not None, seqused_k is not None))
        return kernel, arrays, Options(drop, block_mask)

    def _of(self, types: tuple[Any, Any, Any, bool, bool, bool]) -> Kernel:
        """The kernel for arrays of mask and score functions and sinks of these types, with or without dropout, lists of
        blocks and numbers of used keys."""
        *functions, sinks, drops, listed, used = types
        own = (self.spec.sinks, self.spec.dropout, self.spec.listed, self.spec.used)
        if self._retrace is None and (sinks, drops, listed, used) == own:
            return self
        kernel = self._of_types.get(types)
        if kernel is None:
            spec = auxiliary.concrete(self.spec, self._retrace, tuple(functions)) if self._retrace else self.spec
            spec = replace(spec, sinks=sinks, dropout=drops, listed=listed, used=used)
            kind: Any = type(self)
            kernel = kernel_for(spec, self.arch, self.layout, self.target, self._pinned, kind)
            self._of_types[types] = kernel
        return kernel
