"""Running a kernel on arrays that go by their names in it: checked, bound, launched or interpreted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from flashgen.attention.lengths import USED, batch_rows
from flashgen.plan.arch import Arch, check_real, for_capability, portable_record
from flashgen.runtime import auxiliary, dropping, launch, lengths, sink_arrays, workspaces
from flashgen.runtime.arguments import (
    VECTORS,
    Problem,
    aligned_rows,
    check,
    check_results,
    check_scale,
    gapless,
    row_strides,
    shown,
    unreadable,
    without_memory,
)
from flashgen.runtime.arrays import Library, library_of
from flashgen.runtime.call import Call
from flashgen.runtime.tensormap import through_batches
from flashgen.spec import Spec, check_kernels, interpreted

if TYPE_CHECKING:  # the compiler is imported when there is something to compile: it is most of the import time
    from flashgen import build
    from flashgen.runtime.blocks import BlockMask
    from flashgen.runtime.program import Bound, Program

log = logging.getLogger("flashgen")
BOUND_LIMIT = 4096


@dataclass(frozen=True)
class Options:
    """What a call brings that is no array.

    drop: its dropout. block_mask: which blocks are visited. queries: about how many queries a sequence has, where the
    shapes do not say it.
    """

    drop: dropping.Drop | None = None
    block_mask: BlockMask | None = None
    queries: int | None = None


PLAIN = Options()


@cache
def programs(stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
    """The programs of "forward" or "backward"; one object for each spec and chip in the process."""
    from flashgen import build

    made = build.forward(spec, arch) if stage == "forward" else build.backward(spec, arch)
    return tuple(program_of(stages) for stages in made)


@cache
def program_of(stages: build.Stages) -> Program:
    """The program of a kernel; one object in the process."""
    from flashgen.runtime.program import Program

    return Program(stages)


class Runner:
    """One spec on one chip, for arrays of exactly its types."""

    KEPT_CALLS = BOUND_LIMIT

    def __init__(self, spec: Spec, arch: Arch, layout: str, target: str, pinned: bool) -> None:
        """pinned: compile for this chip, whatever the device is."""
        self.spec = spec
        self.arch = arch
        self.layout = layout
        self.target = target
        self._pinned = pinned
        self._bound: dict[tuple, Call] = {}

    def forward_of(self, arrays: dict[str, Any], scale: float | None, options: Options = PLAIN) -> tuple[Any, Any]:
        """o and lse from q, k, v and what else the kernel reads."""
        q = arrays["q"]
        library = library_of(q)
        call = self._bind(library, "forward", arrays, scale, options)
        if options.block_mask is not None:
            arrays = arrays | options.block_mask.lists(call)
        o = library.empty(call.o_shape, q)
        lse = library.empty(call.lse_shape, q, float32=self.spec.dtype.bytes < 8)
        if call.launches is None:
            from flashgen.runtime import interpret

            interpret.forward(self._interpreted(call), library, self.layout, call, arrays, (o, lse), options.drop)
        else:
            (bound,) = call.launches
            pointers = library.pointers(bound.arguments(arrays | {"o": o, "lse": lse}))
            bound.launch(pointers, library.stream(call.device), call.device, options.drop)
        return o, lse

    def backward_of(
        self, arrays: dict[str, Any], scale: float | None, options: Options = PLAIN, wanted: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """The gradients of q, k, v, of sinks where they are among the arrays, and of wanted arrays, by these names.

        arrays: those of the forward, o, lse, dout, and dlse, which is zero where it is missing.
        wanted: of what the score function reads.
        """
        self.spec.check_differentiable()
        q, sinks, hosted = arrays["q"], arrays.get("sinks"), None
        library = library_of(q)
        call = self._bind(library, "backward", arrays, scale, options)
        arrays = arrays | {name: library.contiguous(arrays[name]) for name in call.copied}
        if options.block_mask is not None:
            arrays |= options.block_mask.lists(call)
        if "dlse" not in arrays:
            arrays["dlse"] = library.zeros(call.lse_shape, q)
        for name in "qkv":
            arrays[f"d{name}"] = library.empty(tuple(arrays[name].shape), q)
        if sinks is not None:
            arrays["dsinks"] = library.empty(tuple(sinks.shape), q, float32=self.spec.dtype.bytes < 8)
        if call.launches is None:
            from flashgen.runtime import interpret

            stages = self._interpreted(call)
            hosted = interpret.backward(stages, library, self.layout, call, arrays, options.drop)
        else:
            for name, shape in call.workspaces.items():
                arrays[name] = library.empty(shape, q, float32=True)
            stream = library.stream(call.device)
            for bound in call.launches:
                bound.launch(library.pointers(bound.arguments(arrays)), stream, call.device, options.drop)
        gradients = {name: arrays[f"d{name}"] for name in "qkv"}
        gradients |= {} if sinks is None else {"sinks": library.cast(arrays["dsinks"], sinks)}
        if wanted:
            gradients |= self._of_wanted(wanted, library, call, arrays, options.drop, hosted)
        return gradients

    def _of_wanted(
        self,
        wanted: tuple[str, ...],
        library: Library,
        call: Call,
        arrays: dict[str, Any],
        drop: dropping.Drop | None,
        hosted: Any,
    ) -> dict[str, Any]:
        """The gradients of arrays that the score function reads, once those of q, k and v are there.

        hosted: the arrays as the interpreter has left them; None where kernels were launched.
        """
        from flashgen.runtime import aux_gradients

        if hosted is None:
            run = aux_gradients.launching(call, library, arrays, drop)
        else:
            run = aux_gradients.interpreting(self.spec, self.arch, call, library, hosted, drop)
        return {
            name: aux_gradients.gradient(library, self.spec, name, arrays[name], call.problem, run) for name in wanted
        }

    def programs(self, stage: str, spec: Spec, arch: Arch) -> tuple[Program, ...]:
        """What a call launches; the tuner overrides it."""
        return programs(stage, spec, arch)

    def _interpreted(self, bound: Call) -> tuple[build.Stages, ...]:
        from flashgen import build

        spec = replace(interpreted(self.spec), tiled=False)  # it reads elements, wherever they lie
        return build.forward(spec, self.arch) + (build.backward(spec, self.arch) if bound.backward else ())

    def _bind(
        self, library: Library, stage: str, arrays: dict[str, Any], scale: float | None, options: Options = PLAIN
    ) -> Call:
        """The checked and bound call for arrays of these shapes, strides and alignment."""
        check_scale(scale, self.spec.head_dim)
        key: list[Any] = [stage, scale, library.name, options.queries]
        if options.block_mask is not None:
            key.append(options.block_mask.signature)
        kind = type(arrays["q"])  # of which the library is known
        for name, array in arrays.items():
            if type(array) is not kind and library_of(array, name) is not library:
                raise TypeError(f"{shown(name)} is not of {library.name} as q is; convert all arrays to one library")
            try:
                key.append(library.signature(array))
            except RuntimeError:  # of a sparse tensor, a nested one, or one that stands for a batch of them
                raise without_memory(shown(name)) from None
        known = tuple(key)
        call = self._bound.get(known)
        if call is None:
            call = self._prepare(library, stage, arrays, scale, options)
            if len(self._bound) >= self.KEPT_CALLS:
                self._bound.clear()
            self._bound[known] = call
        if call.launches is None:  # what is on the host anyway is looked at: it decides what is read
            self.check_values(library, arrays)
        return call

    def check_values(self, library: Library, arrays: dict[str, Any]) -> None:
        """ValueError for numbers that no call may have. Of arrays on a GPU this waits for the device."""
        seqlen_k = arrays["k"].shape[1 if self.layout == "bshd" else 2]
        lengths.check_values(library, arrays, seqlen_k)

    def _prepare(
        self, library: Library, stage: str, arrays: dict[str, Any], scale: float | None, options: Options
    ) -> Call:
        """Check everything, and bind the programs."""
        problem = self._problem(library, arrays)
        scale = check_scale(scale, self.spec.head_dim)
        device = library.device(arrays["q"])
        on_gpu = choose_target(self, device)
        if on_gpu:
            check_kernels(self.spec)
        o_shape = self._shape(problem.batch, problem.seqlen_q, problem.heads, self.spec.head_dim_v)
        lse_shape = self._lse_shape(problem)
        call = Call(problem, scale, o_shape, lse_shape, device or 0, stage == "backward")
        check_results(self.spec, library, o_shape, lse_shape, arrays)
        auxiliary.check(self.spec, problem, library, arrays)
        sink_arrays.check(problem, library, arrays)
        if not self.spec.varlen:
            lengths.check(problem, library, arrays)
        dropping.check(self.spec, problem)
        call.copied = unreadable(library, self.layout, arrays)
        if options.block_mask is not None:
            options.block_mask.check(self.spec, problem, library, device)
        if not on_gpu:
            self._take_lists(call, self._interpreted(call)[int(call.backward) :], options)
            return call
        assert device is not None
        read = auxiliary.layouts(self._read(), library, arrays)
        tiles = {name: array for name, array in arrays.items() if name not in (*VECTORS, *call.copied, *read)}
        strides = {name: row_strides(library.strides(array), self.layout) for name, array in tiles.items()}
        aligned = all(aligned_rows(library, array) and library.pointer(array) % 16 == 0 for array in tiles.values())
        arch = self._arch_for(device)
        if arch.portable and any(step <= 0 for name in ("q", "k", "v", "dout") for step in strides.get(name, ())):
            log.info("%s: TMA takes no stride of zero or less; the %s kernels run", self, arch.portable)
            arch = portable_record(arch)
        if arch.portable and self.spec.used and not self.spec.varlen and None in self._through(problem, strides):
            log.info(
                "%s: k or v has no whole number of rows from batch to batch; the %s kernels run", self, arch.portable
            )
            arch = portable_record(arch)
        spec = replace(self.spec, aligned=aligned, tiled=self._tiled(arch, problem, library, arrays))
        queries = problem.seqlen_q if options.queries is None else options.queries
        made = self.programs(stage, self._for_sizes(stage, spec, arch, problem, queries), arch)
        read |= self._take_lists(call, [program.stages for program in made], options)
        call.launches = self._launches(stage, made, call, strides | read)
        call.made = spec, arch
        return call

    def _through(self, problem: Problem, strides: Mapping[str, tuple[int, ...]]) -> list[tuple[int, int] | None]:
        """How rows of k and of v are counted through all batches, None where they cannot be."""
        return [through_batches(strides[name], problem.batch, problem.seqlen_k) for name in "kv"]

    def _tiled(self, arch: Arch, problem: Problem, library: Library, arrays: dict[str, Any]) -> bool:
        """True where TMA copies tiles of what the score function reads by query and key."""
        if arch.family != "sm90" or not self.spec.arrays:
            return False
        from flashgen.runtime import tiles

        reason = tiles.unfit(self.spec, problem, library, arrays)
        if reason:
            log.info("%s: %s; it is read element by element", self, reason)
        return not reason and tiles.any_fit(self.spec)

    def _take_lists(self, call: Call, made: Iterable[build.Stages], options: Options) -> dict[str, tuple[int, ...]]:
        """Note which lists of blocks these kernels walk; how each of them lies."""
        if options.block_mask is None:
            return {}
        call.lists = options.block_mask.requests(made, call.problem)
        return {item.name: options.block_mask.layout(item) for item in call.lists}

    def _problem(self, library: Library, arrays: dict[str, Any]) -> Problem:
        """The checked sizes of a call."""
        return check(self.spec, self.layout, library, arrays["q"], arrays["k"], arrays["v"])

    def _read(self) -> tuple[str, ...]:
        """The names of the arrays that are read element by element."""
        more = (("sinks",) if self.spec.sinks else ()) + ((USED,) if self.spec.used else ())
        return (*(item.name for item in self.spec.arrays), *more)

    def _for_sizes(self, stage: str, spec: Spec, arch: Arch, problem: Problem, queries: int) -> Spec:
        """The spec of a forward or backward of these sizes."""
        from flashgen import build

        if stage == "forward":
            suited = build.for_sizes(spec, arch, queries, problem.seqlen_k, problem.heads // problem.heads_kv)
        else:
            suited = build.backward_for_sizes(spec, arch, problem.seqlen_k)
        if suited != spec:
            log.debug("%s: a call of %d queries and %d keys takes %s", self, queries, problem.seqlen_k, suited)
        return suited

    def _launches(self, stage: str, made: tuple[Program, ...], call: Call, strides: dict) -> tuple[Bound, ...]:
        """Bind each program to the strides of its arrays, and note the workspaces."""
        problem = call.problem
        vector = (problem.heads * problem.seqlen_q, problem.seqlen_q)
        known: dict[str, tuple[int, ...]] = dict.fromkeys(VECTORS, vector)
        known |= dict.fromkeys(("o", "dout"), row_strides(gapless(call.o_shape), self.layout)) | strides
        scalars = problem.scalars(call.scale) | {"multiprocessors": launch.multiprocessors(call.device), "zero": 0}
        if self.spec.used and not self.spec.varlen:
            counted = zip("kv", self._through(problem, strides), strict=True)
            scalars |= {batch_rows(name): through[1] for name, through in counted if through}
        if self.spec.arrays:
            from flashgen.runtime import tiles

            scalars |= tiles.scalars(self.spec, strides)
        if stage == "backward":
            for name, heads, seqlen, width in (
                ("dq", problem.heads, problem.seqlen_q, self.spec.head_dim),
                ("dk", problem.heads_kv, problem.seqlen_k, self.spec.head_dim),
                ("dv", problem.heads_kv, problem.seqlen_k, self.spec.head_dim_v),
            ):
                shape = self._shape(problem.batch, seqlen, heads, width)
                known[name] = row_strides(gapless(shape), self.layout)
            scalars["padding"] = padding = made[1].stages.plan.sizes["block_q"]
            rows = problem.padded_rows(padding)
            summed = problem.summed_rows(padding)
            call.workspaces = workspaces.shapes(made, problem.batch, problem.heads, rows, summed)
            known["dsinks"] = (problem.heads, problem.heads)
        call.known = known, scalars
        return tuple(program.bind(known | workspaces.strides(program, call.workspaces), scalars) for program in made)

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

    def _lse_shape(self, problem: Problem) -> tuple[int, ...]:
        return problem.batch, problem.heads, problem.seqlen_q

    def _shape(self, batch: int, seqlen: int, heads: int, width: int) -> tuple[int, ...]:
        return (batch, seqlen, heads, width) if self.layout == "bshd" else (batch, heads, seqlen, width)


def choose_target(kernel: Runner, device: int | None) -> bool:
    """True to launch on the GPU, False to interpret."""
    if kernel.target == "cuda" and device is None:
        raise ValueError("target = 'cuda' but q is on the host; move q, k and v to a GPU or use target='auto'")
    return device is not None and kernel.target != "interpret"
