"""The planner's contracts: what it places, estimates, rejects and chooses. Which tile is fastest is not asked here."""

import random
import re
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen import build
from flashgen.attention import backward, forward
from flashgen.interp import tile
from flashgen.ir.dtype import BF16, F32
from flashgen.ir.expr import Const, I, J, load
from flashgen.ir.expr import evaluate as value_of
from flashgen.ir.graph import interference
from flashgen.ir.nodes import Buffer, Copy, Fill, For, Gemm, Kernel, Level, Map, Space
from flashgen.plan import cost, planner, smem, tuned
from flashgen.plan.arch import ARCHES, KIB, TOY, Arch, for_capability, parse_arch, with_shared_memory
from flashgen.plan.operands import routed, shared_twin, through_shared
from flashgen.spec import Spec

ALL = (8, 64, 128, 256)
SMALLEST = parse_arch("sm_86")
LEADERS = {False: (forward.forward, backward.backward), True: (backward.backward, backward.backward_dq)}
named = {"ids": lambda value: str(value.name) if isinstance(value, Arch) else str(value)}


def judged(kernel, spec, arch):
    """Verdicts of the candidates, one after another."""
    sizes = planner.head_dims(spec, arch)
    return (planner.judge(kernel, arch, sizes, candidate) for candidate in planner.candidates(kernel, arch, sizes))


def every(kernel, spec, arch):
    """Verdicts of the candidates of any family."""
    return planner.judged(kernel, arch, planner.head_dims(spec, arch))


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
        if along_rows * along_cols != plan.warps or rows % (m * along_rows) or cols % (2 * n * along_cols):
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


PORTABLE = [arch for arch in ARCHES.values() if arch.family == "sm80"]

# Every chip, every head_dim


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


# The map of shared memory


@st.composite
def straight_kernels(draw):
    """Shared buffers that are filled and read at random places, some of them in a loop."""
    names = [f"t{at}" for at in range(draw(st.integers(1, 7)))]
    dims = st.sampled_from(["small", "large", "odd"])
    buffers = [Buffer(name, (draw(dims), draw(dims)), BF16, Space.SHARED) for name in names]
    register = Buffer("x", ("small", "small"), F32, Space.REGISTER)
    steps = [(draw(st.integers(0, 20)), Fill(name, Const(0.0))) for name in names]
    steps += [(at + draw(st.integers(0, 20)), Map("x", load(fill.dst, I, J))) for at, fill in steps]
    body = [stmt for _, stmt in sorted(steps, key=lambda step: step[0])]
    cut = draw(st.integers(0, len(body)))
    loop = (For("k", Const(0), Const(2), tuple(body[cut:])),) if draw(st.booleans()) and cut < len(body) else body[cut:]
    return Kernel("random", Level.TILE, (), (), (*buffers, register), (*body[:cut], *loop))


SIZES = {"small": 16, "large": 64, "odd": 24}


@settings(max_examples=100, deadline=None)
@given(straight_kernels(), st.integers(1, 3))
def test_buffers_that_are_alive_together_do_not_overlap(kernel, stages):
    depth = {"t0": stages}
    places = {place.buffer: place for place in smem.allocate(kernel, SIZES, depth)}
    alive = interference(kernel, Space.SHARED)
    assert places.keys() == set(alive.nodes)
    for one, other in combinations(places.values(), 2):
        overlap = one.offset < other.end and other.offset < one.end
        assert not (overlap and alive.has_edge(one.buffer, other.buffer)), f"{one.buffer} and {other.buffer}"
    for name, place in places.items():
        rows, cols = (SIZES[dim] for dim in kernel.buffer(name).shape)
        assert place.offset % 16 == 0 and place.end - place.offset == depth.get(name, 1) * rows * place.row_bytes
        assert cols * 2 <= place.row_bytes <= cols * 2 + 16
        below = [other.end for other in places.values() if alive.has_edge(name, other.buffer)]
        assert place.offset == 0 or place.offset in {-(-end // 16) * 16 for end in below}, "a gap without a reason"


def test_space_is_shared_where_lifetimes_allow():
    """O lies over Q, dK over K: what the forward and backward gain by the graph."""
    plan = build.forward(Spec(64, 64), SMALLEST)[0].plan
    assert plan.placement("o_tile").offset == plan.placement("q_tile").offset
    apart = sum(place.end - place.offset for place in plan.shared)
    assert plan.shared_bytes <= apart - plan.placement("o_tile").stage_bytes
    main = build.backward(Spec(64, 64), SMALLEST)[1].plan
    assert main.shared_bytes < sum(place.end - place.offset for place in main.shared)


def test_the_map_does_not_depend_on_the_order_of_declarations():
    spec = Spec(64, 64)
    kernel = backward.backward(spec)
    plan = build.backward(spec, SMALLEST)[1].plan
    shuffled = kernel.having(buffers=tuple(random.Random(0).sample(kernel.buffers, len(kernel.buffers))))
    assert smem.allocate(shuffled, plan.sizes, plan.stages) == smem.allocate(kernel, plan.sizes, plan.stages)


# Estimates against what the tile interpreter counts


BLOCKS = {"block_q": 32, "block_kv": 16, "head_dim": 16, "head_dim_v": 32}
SEQLEN_Q, SEQLEN_K, HEADS, GROUP = 96, 64, 4, 2


def counted(kernel, spec):
    """What one block moves and computes, by the interpreter's counter, and its loop steps."""
    scalars = {"seqlen_q": SEQLEN_Q, "seqlen_k": SEQLEN_K, "heads": HEADS, "heads_kv": HEADS // GROUP, "group": GROUP}
    scalars |= {"batches": 1, "scale": 0.25, "scale_log2": 0.25}
    lengths = {"seqlen_q_padded": SEQLEN_Q, "batches": 1}
    arrays = {}
    for buffer in kernel.buffers:
        if buffer.space is Space.GLOBAL:
            heads = HEADS // GROUP if buffer.name in ("k", "v", "dk", "dv") else HEADS
            dims = {**BLOCKS, **scalars, **lengths, "heads": heads}
            arrays[buffer.name] = np.zeros([dims[dim] for dim in buffer.shape], np.float32)
    counter = tile.Counter()
    tile.run(kernel, BLOCKS, arrays, scalars, counter)
    blocks = np.prod([value_of(axis.extent, {**BLOCKS, **scalars}) for axis in kernel.axes])
    steps = SEQLEN_K // BLOCKS["block_kv"] if "kv_block" not in {axis.name for axis in kernel.axes} else None
    return counter, int(blocks), steps or GROUP * SEQLEN_Q // BLOCKS["block_q"]


SPEC = Spec(BLOCKS["head_dim"], BLOCKS["head_dim_v"])
MAKERS = (forward.forward, backward.delta, backward.backward, backward.convert_dq, backward.backward_dq)


@pytest.mark.parametrize("make", MAKERS)
def test_traffic_is_what_the_interpreter_counts(make):
    kernel = make(SPEC)
    counter, blocks, steps = counted(kernel, SPEC)
    assert cost.traffic_bytes(kernel, BLOCKS, steps) * blocks == counter.global_bytes_read > 0


@pytest.mark.parametrize("make", [forward.forward, backward.backward, backward.backward_dq])
def test_flops_are_what_the_interpreter_counts(make):
    kernel = make(SPEC)
    counter, blocks, steps = counted(kernel, SPEC)
    products = [stmt for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm)]
    flops = sum(cost.gemm_flops(kernel, product, BLOCKS) for product in products)
    assert flops * steps * blocks == counter.flops > 0
    layouts = {item.name: (2, 1) for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2}
    assert cost.step(kernel, SMALLEST, BLOCKS, layouts, 2).flops == flops


def test_products_read_their_operands_once_a_warp_that_needs_them():
    """s = q k^T on 2 x 4 warps: each reads its 16 rows of q (32 bytes each) and its 4 columns of k."""
    kernel = forward.forward(SPEC)
    product = next(stmt for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm) and stmt.acc == "s")
    assert cost.gemm_shared_bytes(kernel, product, BLOCKS, {"s": (2, 4)}) == 8 * (16 * 32 + 4 * 32)


@pytest.mark.parametrize("make", [forward.forward, backward.backward, backward.backward_dq])
def test_registers_hold_at_least_the_accumulators_of_the_loop(make):
    kernel = make(SPEC)
    layouts = {item.name: (2, 1) for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2}
    small, large = (cost.accumulator_registers(kernel, BLOCKS, threads, layouts) for threads in (128, 64))
    carried = {stmt.acc for stmt in cost.loop_statements(kernel) if isinstance(stmt, Gemm) and stmt.accumulate}
    elements = sum(BLOCKS[kernel.buffer(acc).shape[0]] * BLOCKS[kernel.buffer(acc).shape[1]] for acc in (*carried, "s"))
    assert elements // 64 <= large and elements // 128 <= small < large
    every = sum(np.prod([BLOCKS[d] for d in b.shape]) for b in kernel.buffers if b.space is Space.REGISTER)
    assert large < every, "tiles that are never alive together are not added up"


def test_resident_blocks_are_bounded_by_each_limit():
    arch = parse_arch("sm_80")
    assert cost.resident_blocks(arch, 128, 128, 10) == 4  # registers: 65536 / (128 * 128)
    assert cost.resident_blocks(arch, 128, 32, 40 * KIB) == 4  # shared memory: 164 / 41
    assert cost.resident_blocks(arch, 1024, 32, 0) == 2  # threads: 2048 / 1024
    assert cost.resident_blocks(arch, 128, 32, arch.shared_per_multiprocessor) == 0


# Rejections, order, errors


REASONS = {
    "shape": r"^\w+ of (\d+) x (\d+) does not divide among the warps into (\d+) x (\d+) pieces$",
    "shared": r"^([\d.]+) KiB of shared memory exceed the ([\d.]+) KiB of a block$",
    "registers": r"^about (\d+) registers a thread exceed (\d+): it would spill$",
}


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_each_rejection_is_a_sentence_that_names_the_limit(make):
    spec = Spec(128, 128)
    seen = set()
    for verdict in judged(make(spec), spec, SMALLEST):
        if not verdict.rejection:
            assert verdict.cost > 0 and "registers" in verdict.why
            continue
        (kind,) = [kind for kind, pattern in REASONS.items() if re.match(pattern, verdict.rejection)]
        numbers = [float(number) for number in re.match(REASONS[kind], verdict.rejection).groups()]
        assert kind == "shape" or numbers[0] > numbers[1] > 0, verdict.rejection
        seen.add(kind)
    assert {"shared", "registers"} <= seen


def test_explain_shows_the_choice_and_every_rejection():
    plan = build.forward(Spec(128, 128, causal=True), SMALLEST)[0].plan
    explained = plan.explain()
    assert str(plan.candidate) in explained and len(plan.verdicts) > 20
    for verdict in plan.verdicts:
        assert f"{verdict.candidate}: {verdict.rejection or verdict.why}" in explained
    costs = [verdict.cost for verdict in plan.verdicts if not verdict.rejection]
    assert costs == sorted(costs) and len(costs) > 1
    assert plan.text() in explained and not any(verdict.why in plan.text() for verdict in plan.verdicts if verdict.why)


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_the_order_is_total_and_the_choice_does_not_depend_on_the_enumeration(monkeypatch, make):
    spec = Spec(64, 64)
    kernel = make(spec)
    plan = planner.plan(kernel, spec, SMALLEST)
    names = [str(verdict.candidate) for verdict in plan.verdicts]
    assert len(set(names)) == len(names), "two candidates of one name: the order among them is chance"
    shuffled = list(planner.candidates(kernel, SMALLEST, planner.head_dims(spec, SMALLEST)))
    random.Random(1).shuffle(shuffled)
    monkeypatch.setattr(planner, "candidates", lambda *_: shuffled)
    again = planner.plan(kernel, spec, SMALLEST)
    assert again == plan and again.verdicts == plan.verdicts


class Preferred:
    note = "made up, 1.00 ms"

    def __init__(self, candidate):
        self.candidate = candidate

    def matches(self, candidate):
        return candidate == self.candidate


def test_a_measurement_overrides_the_cost_model_where_it_fits(monkeypatch):
    spec = Spec(64, 64)
    kernel = forward.forward(spec)
    monkeypatch.setattr(planner.tuned, "lookup", lambda *_: None)
    verdicts = planner.plan(kernel, spec, SMALLEST).verdicts
    for wanted, heeded in ((verdicts[1], True), (verdicts[-1], False)):
        assert bool(wanted.rejection) != heeded
        monkeypatch.setattr(planner.tuned, "lookup", lambda *_, wanted=wanted: Preferred(wanted.candidate))
        plan = planner.plan(kernel, spec, SMALLEST)
        assert (plan.candidate == wanted.candidate) == heeded
        assert (plan.source == "measurement: made up, 1.00 ms") == heeded


def measured(candidate, note="made up"):
    return tuned.Measured(candidate.blocks, candidate.warps, candidate.depths, note, candidate.split)


PLANNED = {
    "attention_forward": (forward.forward, False),
    "attention_backward": (backward.backward, False),
    "attention_backward_dq": (backward.backward_dq, True),
}


def ill_fitting(table):
    """A sentence for each line of a table that names no candidate, several, or one that is rejected."""
    for (chip, name, head_dim, head_dim_v, causal), line in table.items():
        make, deterministic = PLANNED[name]
        spec = Spec(head_dim, head_dim_v, causal=causal, deterministic=deterministic)
        found = [verdict for verdict in every(make(spec), spec, parse_arch(chip)) if line.matches(verdict.candidate)]
        if len(found) != 1:
            yield f"{chip} {name} {spec}: {len(found)} candidates have these blocks, warps, stages and split"
        yield from (f"{chip} {name} {spec}: {verdict.rejection}" for verdict in found if verdict.rejection)


def test_every_measured_line_names_a_candidate_that_fits():
    assert list(ill_fitting(tuned.TABLE)) == []


@pytest.mark.parametrize("name", PLANNED)
def test_a_planted_measured_line_is_checked(name):
    make, deterministic = PLANNED[name]
    spec = Spec(128, 128, causal=True, deterministic=deterministic)
    verdicts = planner.plan(make(spec), spec, SMALLEST).verdicts
    key = (SMALLEST.name, name, 128, 128, True)
    good = [measured(verdict.candidate) for verdict in verdicts if not verdict.rejection]
    bad = measured(next(verdict.candidate for verdict in verdicts if verdict.rejection and not verdict.unfit))
    assert good and all(list(ill_fitting({key: line})) == [] for line in good)
    assert "exceed" in " ".join(ill_fitting({key: bad}))
    for change in ({"warps": 3}, {"stages": (9,)}, {"split": 4}, {"blocks": (("block_q", 8),)}):
        (said,) = ill_fitting({key: replace(good[0], **change)})
        assert said.startswith("sm_86 " + name) and "0 candidates" in said


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_a_measured_line_tells_all_candidates_apart(make):
    spec = Spec(128, 128)
    offered = [verdict.candidate for verdict in judged(make(spec), spec, SMALLEST)]
    assert all([other for other in offered if measured(one).matches(other)] == [one] for one in offered)
    assert (len({one.split for one in offered}) > 1) == (make is backward.backward)


def test_a_measured_line_that_does_not_fit_is_said_in_the_plan(monkeypatch):
    spec = Spec(64, 64, causal=True)
    kernel = forward.forward(spec)
    usual = planner.plan(kernel, spec, SMALLEST)
    line = replace(measured(usual.candidate), warps=3)
    monkeypatch.setitem(tuned.TABLE, (SMALLEST.name, kernel.name, 64, 64, True), line)
    plan = planner.plan(kernel, spec, SMALLEST)
    assert plan.candidate == usual.candidate
    assert "chosen by cost model; the measured choice does not fit" in plan.text()


def test_a_line_is_what_the_table_takes():
    """For the forward and for a split backward: the text evaluates to the item that chooses the candidate."""
    spec = Spec(128, 128, causal=True)
    for kernel in (forward.forward(spec), backward.backward(spec)):
        splits = {}
        for verdict in planner.plan(kernel, spec, SMALLEST).verdicts:
            splits.setdefault(verdict.candidate.split, verdict.candidate)
        for split, candidate in splits.items():
            text = tuned.line(kernel.name, spec, SMALLEST, candidate, "CARD, DATE, 1 TFLOP/s", "COMMAND --x")
            made = eval("{" + text + "}", {"Measured": tuned.Measured})
            note = "CARD, DATE, 1 TFLOP/s: COMMAND --x"
            assert made == {("sm_86", kernel.name, 128, 128, True): measured(candidate, note)}
            assert ("split" in text) == (split > 1) and all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("make", [forward.forward, backward.backward])
def test_a_chip_that_is_too_small_is_told_which_limit(make):
    spec = Spec(128, 128)
    kernel = make(spec)
    with pytest.raises(
        planner.PlanError, match=rf"no tile of {kernel.name} fits sm_86: even .* shared memory exceed the 4 KiB"
    ):
        planner.plan(kernel, spec, with_shared_memory(SMALLEST, 4 * KIB))


def test_less_shared_memory_takes_less():
    spec = Spec(128, 128)
    for bytes_ in (227 * KIB, 96 * KIB, 64 * KIB, 32 * KIB):
        plan = build.forward(spec, with_shared_memory(parse_arch("sm_90"), bytes_))[0].plan
        assert plan.shared_bytes <= bytes_


# Operands that go through shared memory


def layouts_of(kernel, **changes):
    tiles = [item.name for item in kernel.buffers if item.space is Space.REGISTER and len(item.shape) == 2]
    return {**dict.fromkeys(tiles, (4, 1)), **changes}


def test_operands_stay_in_registers_where_the_rows_agree():
    kernel = forward.forward(Spec(64, 64))
    assert routed(kernel, layouts_of(kernel)) == []
    assert through_shared(kernel, layouts_of(kernel)) is kernel


def test_a_new_tile_for_a_routed_operand_and_an_old_one_where_there_is_one():
    kernel = backward.backward(Spec(64, 64))
    layouts = dict.fromkeys(layouts_of(kernel), (2, 2))
    assert routed(kernel, layouts) == ["p_operand", "ds_operand"]
    assert (shared_twin(kernel, "p_operand"), shared_twin(kernel, "ds_operand")) == ("p_tile", "ds_tile")
    result = through_shared(kernel, layouts)
    assert routed(result, layouts) == []
    assert {b.name for b in result.buffers} - {b.name for b in kernel.buffers} == {"p_tile"}
    body = list(cost.loop_statements(result))
    copies = [stmt for stmt in body if isinstance(stmt, Copy) and stmt.src in ("p_operand", "ds_operand")]
    assert [(copy.dst, copy.src) for copy in copies] == [("p_tile", "p_operand"), ("ds_tile", "ds_operand")]
    assert all(
        body.index(copy) < body.index(next(s for s in body if isinstance(s, Gemm) and s.a == copy.dst))
        for copy in copies
    )


# Chip records


@pytest.mark.parametrize("arch", PORTABLE, **named)
def test_records_are_consistent(arch):
    own = for_capability(*arch.capability)
    assert parse_arch(arch.name) is arch and (own is arch or own.portable == arch.name)
    assert arch.shared_per_block == arch.shared_per_multiprocessor - KIB
    assert arch.title and arch.target == arch.name


def test_unknown_chips_are_refused():
    assert for_capability(8, 9).name == "sm_89" and for_capability(12, 1).name == "sm_120"
    assert for_capability(8, 8).name == "sm_87"
    with pytest.raises(ValueError, match=r"arch = 'sm_75' is not known; use one of sm_80, .*sm_120"):
        parse_arch("sm_75")
    with pytest.raises(ValueError, match=r"compute capability 7\.5 is not supported"):
        for_capability(7, 5)
    with pytest.raises(ValueError, match="sram = 0 must be a positive number of bytes"):
        with_shared_memory(SMALLEST, 0)


def test_a_grid_axis_covers_every_row():
    """ceil_div of the nests: the last block is ragged, no row is left out."""
    for make in MAKERS:
        axis = make(SPEC).axes[0]
        block = "block_kv" if axis.name == "kv_block" else "block_q"
        length = "seqlen_k" if axis.name == "kv_block" else "seqlen_q"
        for rows in (0, 1, 31, 32, 33, 64):
            blocks = value_of(axis.extent, {length: rows, block: 32})
            assert blocks * 32 >= rows > (blocks - 1) * 32
