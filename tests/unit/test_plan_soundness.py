"""Every chip, every head_dim: a plan is found, and nothing is wrong with it."""

from dataclasses import replace
from itertools import product

import pytest
from verdicts import PORTABLE, SMALLEST, judged, named

from flashgen import build
from flashgen.attention import backward, forward
from flashgen.ir.graph import interference
from flashgen.ir.nodes import Space
from flashgen.plan import planner
from flashgen.plan.arch import KIB, TOY, parse_arch, with_shared_memory
from flashgen.plan.operands import through_shared
from flashgen.spec import Spec

LEADERS = {False: (forward.forward, backward.backward), True: (backward.backward, backward.backward_dq)}


def fits(kernel, spec, arch):
    return any(not verdict.rejection for verdict in judged(kernel, spec, arch))


def problems(kernel, plan):
    """Sentences on what is wrong with a plan."""
    arch, sizes = plan.arch, plan.sizes
    m, n, _ = arch.mma
    if plan.shared_bytes > arch.shared_per_block:
        yield f"{plan.shared_bytes} bytes of shared memory"
    if plan.registers > min(arch.max_registers, arch.registers // plan.threads):
        yield f"{plan.registers} registers for each of {plan.threads} threads"
    if not 32 <= plan.threads <= 1024 or plan.min_blocks < 1:
        yield f"{plan.threads} threads, {plan.min_blocks} blocks"
    if plan.min_blocks > 1 and plan.min_blocks * plan.threads > arch.max_threads:
        yield f"{plan.min_blocks} blocks of {plan.threads} threads"
    if plan.min_blocks > 1 and plan.min_blocks * (plan.shared_bytes + KIB) > arch.shared_per_multiprocessor:
        yield f"{plan.min_blocks} blocks of {plan.shared_bytes} bytes"
    for name, (along_rows, along_cols) in plan.layouts.items():
        rows, cols = (sizes[dim] for dim in kernel.buffer(name).shape)
        copies = plan.copies(name)
        if copies not in (1, plan.layouts.get("o_acc", (1, 1))[1]):
            yield f"{name} in {copies} copies, as many as no output is divided by"
        if along_rows * along_cols * copies != plan.warps or rows % (m * along_rows) or cols % (2 * n * along_cols):
            yield f"{name} of {rows} x {cols} by {along_rows} x {along_cols} of {plan.warps} warps"
    yield from misplaced(through_shared(kernel, plan.layouts), plan)


def misplaced(kernel, plan):
    """What is wrong with the map of shared memory."""
    places = {place.buffer: place for place in plan.shared}
    shared = {buffer.name: buffer for buffer in kernel.buffers if buffer.space is Space.SHARED}
    if places.keys() != shared.keys():
        yield f"placed {sorted(places)}, not {sorted(shared)}"
        return
    for name, place in places.items():
        rows, *cols = (plan.sizes[dim] for dim in shared[name].shape)
        if place.offset % 16 or place.stages != plan.stages.get(name, 1):
            yield f"{name} at {place.offset}, {place.stages} stages"
        if place.stage_bytes != rows * place.row_bytes:
            yield f"{name}: {place.stage_bytes} bytes for {rows} rows of {place.row_bytes}"
        if cols and (place.row_bytes < cols[0] * shared[name].dtype.bytes or place.row_bytes % 16):
            yield f"{name}: rows of {place.row_bytes} bytes for {cols[0]} columns"
        if cols and len({row * place.row_bytes // 16 % 8 for row in range(8)}) != 8:
            yield f"{name}: eight rows of {place.row_bytes} bytes share banks"
    for one, other in interference(kernel, Space.SHARED).edges:
        if places[one].offset < places[other].end and places[other].offset < places[one].end:
            yield f"{one} and {other} overlap"


PAIRS = [(d, dv) for d in range(8, 257, 8) for dv in sorted({d, 8, 128, 256})]


def refused(make, deterministic):
    specs = (Spec(d, dv, deterministic=deterministic) for d, dv in PAIRS)
    return [str(spec) for spec in specs if not fits(make(spec), spec, SMALLEST)]


@pytest.mark.parametrize(
    ("make", "deterministic"),
    [
        (forward.forward, False),
        (backward.backward, False),
        (backward.backward, True),
        (backward.backward_dq, True),
    ],
)
def test_every_head_dim_fits_the_smallest_chip(make, deterministic):
    assert refused(make, deterministic) == []


@pytest.mark.parametrize("arch", PORTABLE, **named)
def test_no_chip_has_less_of_anything_than_the_smallest(arch):
    """So the test above speaks for all of them."""
    for limit in ("shared_per_block", "registers", "max_registers", "max_threads"):
        assert getattr(arch, limit) >= getattr(SMALLEST, limit)
    assert (arch.mma, arch.warps) == (SMALLEST.mma, SMALLEST.warps)


SHAPES = [(64, 64), (128, 128), (8, 8), (256, 256), (40, 72), (192, 128)]


@pytest.mark.parametrize(("arch", "shape"), list(zip(PORTABLE, SHAPES, strict=True)), **named)
@pytest.mark.parametrize("deterministic", [False, True])
def test_all_kernels_of_a_spec_have_sound_plans(arch, shape, deterministic):
    spec = Spec(*shape, causal=deterministic, deterministic=deterministic)
    for name, stages in build.everything(spec, arch).items():
        plan = stages.plan
        assert list(problems(stages.tile, plan)) == [], name
        assert plan.kernel == name and plan.arch == arch and plan.vector_bytes == 16
        for dim in {"head_dim", "head_dim_v"} & plan.sizes.keys():
            assert 0 <= plan.sizes[dim] - getattr(spec, dim) < 32 and plan.sizes[dim] % arch.mma[2] == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_candidate_that_fits_has_a_sound_plan(deterministic):
    spec = Spec(32, 64, causal=True, deterministic=deterministic)
    for make in LEADERS[deterministic]:
        kernel = make(spec)
        fitting = [verdict.candidate for verdict in judged(kernel, spec, SMALLEST) if not verdict.rejection]
        assert len(fitting) > 10
        for candidate in fitting:
            assert list(problems(kernel, planner.make(kernel, spec, SMALLEST, candidate))) == [], str(candidate)


def test_an_unsound_plan_is_reported():
    """The checker above must not be blind."""
    stages = build.forward(Spec(32, 32), SMALLEST)[0]
    plan = stages.plan
    laid_over = tuple(replace(place, offset=0) for place in plan.shared)
    assert any("overlap" in problem for problem in problems(stages.tile, replace(plan, shared=laid_over)))
    for change in ({"registers": 300}, {"min_blocks": 40}, {"shared": plan.shared[1:]}):
        assert list(problems(stages.tile, replace(plan, **change))), change


def test_kernels_without_a_loop_follow_the_backward():
    for spec, arch in product((Spec(128, 128), Spec(8, 128)), (SMALLEST, parse_arch("sm_90"))):
        delta, main, convert = (stages.plan for stages in build.backward(spec, arch))
        assert delta.sizes["block_q"] == convert.sizes["block_q"] == main.sizes["block_q"]
        assert convert.layouts["dq_acc"] == main.layouts["dq_acc"], "the accumulator's order would differ"
        assert convert.warps == main.warps


@pytest.mark.parametrize(
    "spec",
    [Spec(8, 8), Spec(16, 8, causal=True), Spec(8, 16, deterministic=True)],
    ids=str,
)
def test_the_toy_chip(spec):
    roomy = with_shared_memory(TOY, 32 * KIB)
    assert list(problems(forward.forward(spec), build.forward(spec, TOY)[0].plan)) == []
    for stages in build.everything(spec, roomy).values():
        assert list(problems(stages.tile, stages.plan)) == []
        with pytest.raises(ValueError, match="toy"):
            _ = stages.source


def test_unaligned_rows_are_copied_by_elements():
    assert build.forward(Spec(64, 64, aligned=False), SMALLEST)[0].plan.vector_bytes == 2
