"""A kernel as its users have it: a spec on a chip, its stages to look at, and calls on arrays."""

from __future__ import annotations

import importlib
import logging
import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from flashgen.plan.arch import Arch, check_real, for_capability, parse_arch, portable_record
from flashgen.runtime import auxiliary, launch, workspaces
from flashgen.runtime.arguments import (
    VECTORS,
    Problem,
    aligned_rows,
    check,
    check_results,
    check_scale,
    check_sizes,
    gapless,
    row_strides,
    unreadable,
    without_memory,
)
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.call import Call, KernelReport
from flashgen.spec import Spec, parse_integer

if TYPE_CHECKING:  # the compiler is imported when there is something to compile: it is most of the import time
    from flashgen import build
    from flashgen.plan.plan import Plan
    from flashgen.runtime.program import Bound, Program

log = logging.getLogger("flashgen")
BOUND_LIMIT = 4096
Aux = tuple[Any, ...] | list[Any] | None


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


@cache
def programs(stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
    """The programs of "forward" or "backward"; one object for each spec and chip in the process."""
    from flashgen import build

    made = build.forward(spec, arch) if stage == "forward" else build.backward(spec, arch)
    return tuple(_program(stages) for stages in made)


@cache
def _program(stages: build.Stages) -> Program:
    from flashgen.runtime.program import Program

    return Program(stages)


@cache
def kernel_for(spec: Spec, arch: Arch, layout: str, target: str, pinned: bool) -> Kernel:
    return Kernel(spec, arch, layout, target, pinned)


class Kernel:
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
        self.spec = spec
        self.arch = arch
        self.layout = layout
        self.target = target
        self._pinned = pinned
        self._bound: dict[tuple, Any] = {}
        self._retrace = retrace
        self._reads = bool(spec.arrays)
        self._of_types: dict[auxiliary.Types, Kernel] = {}

    def __repr__(self) -> str:
        return f"<flashgen kernel {self.spec} for {self.arch.name}, {self.layout}>"

    @cached_property
    def _stages(self) -> dict[str, build.Stages]:
        from flashgen import build

        return build.everything(self.spec, self.arch)

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
        """The CUDA text of each kernel, by name. Raises ValueError for the made-up chip "toy"."""
        check_real(self.arch)
        return {name: stages.source.text for name, stages in self._stages.items()}

    @property
    def report(self) -> Mapping[str, KernelReport]:
        """Registers, spills, shared memory and compile seconds of each kernel, by name; compiles with NVRTC.

        Raises ValueError for the made-up chip "toy".
        """
        check_real(self.arch)
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
        The forward allocates nothing but its results. Gradients of arrays that the score function reads take more: a
        float32 array like each, or (batch, heads, rows) sums, rows being queries or keys.

        It holds for arrays with 16-byte aligned rows; others are copied, or take another plan. No GPU is needed, and
        nothing is compiled. Raises ValueError or TypeError for sizes that a call may not have.
        """
        given = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": heads}
        given["heads_kv"] = heads if heads_kv is None else heads_kv
        sizes = {name: parse_integer(name, size, "use a whole number") for name, size in given.items()}
        check_sizes(**sizes)
        rows = (sizes["batch"], sizes["heads"], sizes["seqlen_q"])
        shapes = workspaces.shapes(self.programs("backward", self.spec, self.arch), *rows)
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
        bias: Any = None,
        alibi_slopes: Any = None,
    ) -> Any:
        """Attention; shapes, types and errors as in `flashgen.attention`, in this kernel's layout.

        mask_aux, score_aux: the arrays that mask_mod and score_mod take behind the others: float32, bfloat16,
        float16 or int32, of as many dimensions as they are indexed by, with any strides.
        bias: of a kernel with bias=True, (batch, heads, seqlen_q, seqlen_k), each of them whole or 1; missing leading
        axes count as 1. alibi_slopes: of one with alibi=True, float32 (heads,) or (batch, heads).
        With torch all floating-point arrays that score_mod reads, bias and alibi_slopes get gradients.
        """
        given = {"mask_aux": mask_aux, "score_aux": score_aux, "bias": bias, "alibi_slopes": alibi_slopes}
        if traced_by_torch():
            return untraced(self)(q, k, v, scale=scale, return_lse=return_lse, **given)
        library = library_of(q)
        arrays = {"q": q, "k": k, "v": v}
        kernel = self
        if self._reads or not (mask_aux is score_aux is bias is alibi_slopes is None):
            kernel, aux = self._for(**given)
            arrays |= aux
        if library.name == "torch":
            torch_ops = _torch_ops()
            if torch_ops.needs_autograd(*arrays.values()):
                o, lse = torch_ops.attention(kernel, arrays, scale)
                return (o, lse) if return_lse else o
        o, lse = kernel.forward_of(arrays, scale)
        return (o, lse) if return_lse else o

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        mask_aux: Aux = None,
        score_aux: Aux = None,
        bias: Any = None,
        alibi_slopes: Any = None,
    ) -> tuple[Any, Any]:
        """o and lse, without autograd."""
        kernel, aux = self._for(mask_aux, score_aux, bias, alibi_slopes)
        return kernel.forward_of({"q": q, "k": k, "v": v} | aux, scale)

    def forward_of(self, arrays: dict[str, Any], scale: float | None) -> tuple[Any, Any]:
        """o and lse from q, k, v and what functions read, by their names in the kernels."""
        q, k, v, *read = arrays.values()
        library = library_of(q)
        bound = self._bind(library, "forward", arrays, scale)
        o = library.empty(bound.o_shape, q)
        lse = library.empty(bound.lse_shape, q, float32=True)
        if bound.launches is None:
            from flashgen.runtime import interpret

            interpret.forward(self._interpreted(bound), library, self.layout, bound, arrays, (o, lse))
            return o, lse
        pointers = library.pointers((q, k, v, o, lse, *read))
        bound.launches[0].launch(pointers, library.stream(bound.device), bound.device)
        return o, lse

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
        mask_aux: Aux = None,
        score_aux: Aux = None,
        bias: Any = None,
        alibi_slopes: Any = None,
        aux_grads: Collection[str] = (),
    ) -> tuple[Any, ...]:
        """dq, dk, dv from the forward's inputs and outputs, the gradient of o, and (optionally) that of lse.

        o, dout: (batch, seqlen_q, heads, head_dim_v) in this kernel's layout and type. lse, dlse: float32
        (batch, heads, seqlen_q), dlse None for zero. Where a kernel cannot read one of these in place it is copied.
        aux_grads: arrays of which gradients are wanted too, as "bias", "alibi_slopes" or "score_aux[0]". The result is
        then (dq, dk, dv, gradients), the last a dict by these words, each like its array in shape and type.
        """
        kernel, aux = self._for(mask_aux, score_aux, bias, alibi_slopes)
        names = {word: auxiliary.differentiable(kernel.spec, word) for word in aux_grads}
        results = {"o": o, "dout": dout, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        *own, found = kernel.backward_of({"q": q, "k": k, "v": v} | results | aux, scale, tuple(names.values()))
        given = {"bias": bias, "alibi_slopes": alibi_slopes}  # which may have fewer axes than a kernel reads
        shaped = {
            word: found[name] if name not in given else found[name].reshape(given[name].shape)
            for word, name in names.items()
        }
        return (*own, shaped) if names else tuple(own)

    def backward_of(self, arrays: dict[str, Any], scale: float | None, wanted: tuple[str, ...]) -> tuple[Any, ...]:
        """dq, dk, dv, and the gradients of the wanted arrays, all by their names in the kernels."""
        q, k, v = (arrays[name] for name in "qkv")
        library = library_of(q)
        bound = self._bind(library, "backward", arrays, scale)
        for name in wanted:
            self._check_gradient(name, arrays[name], bound.problem)
        if "dlse" not in arrays:
            arrays["dlse"] = library.zeros(bound.lse_shape, q)
        for name in bound.copied:
            arrays[name] = library.contiguous(arrays[name])
        dq, dk, dv = (library.empty(tuple(array.shape), q) for array in (q, k, v))
        arrays |= {"dq": dq, "dk": dk, "dv": dv}
        if bound.launches is None:
            from flashgen.runtime import interpret

            hosted = interpret.backward(self._interpreted(bound), library, self.layout, bound, arrays)
            return dq, dk, dv, self._gradients(library, bound, arrays, wanted, hosted)
        for name, shape in bound.workspaces.items():
            arrays[name] = library.empty(shape, q, float32=True)
        stream = library.stream(bound.device)
        for launch_ in bound.launches:
            pointers = library.pointers([arrays[name] for name in launch_.program.tensors])
            launch_.launch(pointers, stream, bound.device)
        return dq, dk, dv, self._gradients(library, bound, arrays, wanted)

    def _gradients(
        self, library: Library, bound: Call, arrays: dict[str, Any], wanted: tuple[str, ...], hosted: Any = None
    ) -> dict[str, Any]:
        """The gradients of arrays that the score function reads, once those of q, k and v are there."""
        if not wanted:
            return {}
        from flashgen.runtime import aux_gradients

        if hosted is None:
            run = aux_gradients.launching(bound, library, arrays)
        else:
            run = aux_gradients.interpreting(self.spec, self.arch, bound, library, hosted)
        every = {item.name: item for item in self.spec.arrays}
        return {
            name: aux_gradients.gradient(library, self.spec, every[name], arrays[name], bound.problem, run)
            for name in wanted
        }

    def _check_gradient(self, name: str, array: Any, problem: Problem) -> None:
        """ValueError for a gradient that this kernel does not give."""
        from flashgen.runtime import aux_gradients

        item = next(item for item in self.spec.arrays if item.name == name)
        aux_gradients.check(self.spec, item, tuple(array.shape), problem)

    def check_gradients(self, arrays: dict[str, Any], scale: float | None, wanted: tuple[str, ...]) -> None:
        """The same for several, before a forward whose backward is to give them."""
        if wanted:
            problem = self._bind(library_of(arrays["q"]), "forward", arrays, scale).problem
            for name in wanted:
                self._check_gradient(name, arrays[name], problem)

    def _for(
        self, mask_aux: Aux = None, score_aux: Aux = None, bias: Any = None, alibi_slopes: Any = None
    ) -> tuple[Kernel, dict[str, Any]]:
        """The kernel for arrays of these types, one object for each spec; and the arrays by their names in it."""
        arrays = auxiliary.named(self.spec, mask_aux, score_aux, bias, alibi_slopes)
        if self._retrace is None:
            return self, arrays
        types = auxiliary.dtypes(self.spec, arrays)
        kernel = self._of_types.get(types)
        if kernel is None:
            spec = auxiliary.concrete(self.spec, self._retrace, types)
            kernel = kernel_for(spec, self.arch, self.layout, self.target, self._pinned)
            self._of_types[types] = kernel
        return kernel, arrays

    def programs(self, stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
        """What a call launches; the tuner overrides it."""
        return programs(stage, spec, arch)

    def _interpreted(self, bound: Call) -> tuple[build.Stages, ...]:
        from flashgen import build

        return build.forward(self.spec, self.arch) + (build.backward(self.spec, self.arch) if bound.backward else ())

    def _bind(self, library: Library, stage: str, arrays: dict[str, Any], scale: float | None) -> Call:
        """The checked and bound call for arrays of these shapes, strides and alignment."""
        check_scale(scale, self.spec.head_dim)
        key: list[Any] = [stage, scale, library.name]
        kind = type(arrays["q"])  # of which the library is known
        for name, array in arrays.items():
            if type(array) is not kind and library_of(array, name) is not library:
                raise TypeError(
                    f"{auxiliary.shown(name)} is not of {library.name} as q is; convert all arrays to one library"
                )
            try:
                key.append(library.signature(array))
            except RuntimeError:  # of a sparse tensor, a nested one, or one that stands for a batch of them
                raise without_memory(auxiliary.shown(name)) from None
        known = tuple(key)
        call = self._bound.get(known)
        if call is None:
            call = self._prepare(library, stage, arrays, scale)
            if len(self._bound) >= BOUND_LIMIT:
                self._bound.clear()
            self._bound[known] = call
        return call

    def _prepare(self, library: Library, stage: str, arrays: dict[str, Any], scale: float | None) -> Call:
        """Check everything, and bind the programs."""
        problem = check(self.spec, self.layout, library, arrays["q"], arrays["k"], arrays["v"])
        scale = check_scale(scale, self.spec.head_dim)
        device = library.device(arrays["q"])
        on_gpu = choose_target(self, device)
        o_shape = self._shape(problem.batch, problem.seqlen_q, problem.heads, self.spec.head_dim_v)
        lse_shape = (problem.batch, problem.heads, problem.seqlen_q)
        call = Call(problem, scale, o_shape, lse_shape, device or 0, stage == "backward")
        check_results(self.spec, library, o_shape, lse_shape, arrays)
        auxiliary.check(self.spec, problem, library, arrays)
        call.copied = unreadable(library, self.layout, arrays)
        if not on_gpu:
            return call
        assert device is not None
        read = auxiliary.layouts(self.spec, library, arrays)
        tiles = {name: array for name, array in arrays.items() if name not in (*VECTORS, *call.copied, *read)}
        strides = {name: row_strides(library.strides(array), self.layout) for name, array in tiles.items()}
        aligned = all(aligned_rows(library, array) and library.pointer(array) % 16 == 0 for array in tiles.values())
        arch = self._arch_for(device)
        if arch.portable and any(step <= 0 for name in ("q", "k", "v", "dout") for step in strides.get(name, ())):
            log.info("%s: TMA takes no stride of zero or less; the %s kernels run", self, arch.portable)
            arch = portable_record(arch)
        spec = replace(self.spec, aligned=aligned)
        made = self.programs(stage, self._packed(spec, arch, problem) if stage == "forward" else spec, arch)
        call.launches = self._launches(stage, made, call, strides | read)
        call.made = spec, arch
        return call

    def _packed(self, spec: Spec, arch: Arch, problem: Problem) -> Spec:
        """The spec of a forward, with as many heads in a tile as its queries leave room for."""
        from flashgen import build

        packed = build.heads_to_pack(spec, arch, problem.seqlen_q, problem.heads // problem.heads_kv)
        if packed > 1:
            log.debug("%s: %d heads share a tile of queries", self, packed)
        return replace(spec, packed=packed)

    def _launches(self, stage: str, made: tuple[Program, ...], call: Call, strides: dict) -> tuple[Bound, ...]:
        """Bind each program to the strides of its arrays, and note the workspaces."""
        problem = call.problem
        vector = (problem.heads * problem.seqlen_q, problem.seqlen_q)
        known: dict[str, tuple[int, ...]] = dict.fromkeys(VECTORS, vector)
        known |= dict.fromkeys(("o", "dout"), row_strides(gapless(call.o_shape), self.layout)) | strides
        if stage == "backward":
            for name, heads, seqlen, width in (
                ("dq", problem.heads, problem.seqlen_q, self.spec.head_dim),
                ("dk", problem.heads_kv, problem.seqlen_k, self.spec.head_dim),
                ("dv", problem.heads_kv, problem.seqlen_k, self.spec.head_dim_v),
            ):
                shape = self._shape(problem.batch, seqlen, heads, width)
                known[name] = row_strides(gapless(shape), self.layout)
            call.workspaces = workspaces.shapes(made, problem.batch, problem.heads, problem.seqlen_q)
            known |= {name: gapless(shape)[:-1] for name, shape in call.workspaces.items()}
        scalars = problem.scalars(call.scale) | {"multiprocessors": launch.multiprocessors(call.device), "zero": 0}
        call.known = known, scalars
        return tuple(program.bind(known, scalars) for program in made)

    def _arch_for(self, device: int) -> Arch:
        """The chip to compile for: the one asked for, where it runs on the device."""
        major, minor = launch.compute_capability(device)
        own = for_capability(major, minor)
        if not self._pinned:
            return own
        check_real(self.arch)
        if self.arch.capability[0] != major or self.arch.capability[1] > minor:
            raise ValueError(f"arch = {self.arch.name} does not run on this GPU; use {own.name} or arch=None")
        return self.arch

    def _shape(self, batch: int, seqlen: int, heads: int, width: int) -> tuple[int, int, int, int]:
        return (batch, seqlen, heads, width) if self.layout == "bshd" else (batch, heads, seqlen, width)


def choose_target(kernel: Kernel, device: int | None) -> bool:
    """True to launch on the GPU, False to interpret."""
    if kernel.target == "cuda" and device is None:
        raise ValueError("target = 'cuda' but q is on the host; move q, k and v to a GPU or use target='auto'")
    return device is not None and kernel.target != "interpret"
