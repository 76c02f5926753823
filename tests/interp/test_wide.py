"""Head dims over 256: both families on the machine interpreter, and the tile interpreter beside dense float64."""

from dataclasses import replace

import pytest
from attention_cases import Problem, assert_close
from lowered_cases import ROOMY, copies, machine_equals_tile

from flashgen import build, lower, masks, scores, variants
from flashgen.attention.forward import forward
from flashgen.interp import machine, tile
from flashgen.interp.common import Deadlock, Hazard
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.lower.sm90 import waits
from flashgen.plan import planner
from flashgen.plan.arch import parse_arch
from flashgen.plan.candidates import tile_names
from flashgen.plan.plan import Candidate
from flashgen.plan.wide import output_layouts
from flashgen.spec import Spec

ARCHES = {name: replace(parse_arch(name), multiprocessors=2) for name in ("sm_80", "sm_90a")}


def wide(head_dim, head_dim_v, causal=True, dtype=BF16, more=None, **options):
    bottom_right, mask, score = variants.functions(causal, **options)
    return Spec(head_dim, head_dim_v, dtype, bottom_right, mask=mask, score=score, **(more or {}))


def equals_tile(spec, case, stages, seeds=(0,)):
    """The values of the tile interpreter, which are returned."""
    plan, kernel = stages.plan, stages.machine
    before = {**case.arrays, **case.outputs(plan.sizes)}
    after = copies(before)
    tile.run(lower.tile(forward(spec)), plan.sizes, after, case.scalars, tile.Counter())
    slack = 3 if plan.has("guessed maximum") else 2  # sums of 576 products, in another order
    for seed in seeds:
        machine_equals_tile(kernel, plan, case, before, after, seed, slack)
    return after


def check(spec, arch, seqlen_q, seqlen_k, **sizes):
    case = Problem(spec, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes)
    found = equals_tile(spec, case, build.forward(spec, ARCHES[arch])[0])
    assert_close(found, case.dense(), spec.dtype, ("o", "lse"))
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "lengths", "causal"),
    [
        (576, 512, (70, 150), True),
        (512, 512, (100, 70), True),  # rows that see no key
        (264, 264, (1, 90), False),
        (320, 320, (65, 64), False),
        (512, 128, (64, 100), True),
        (128, 512, (130, 200), True),
        (576, 512, (5, 0), False),
    ],
)
def test_both_families_equal_the_tile_form_and_dense_attention(arch, head_dim, head_dim_v, lengths, causal):
    check(wide(head_dim, head_dim_v, causal), arch, *lengths, heads=2, heads_kv=1)


OPTIONS = {
    "window": ({"window": (20, 3)}, {}),
    "softcap": ({"softcap": 5.0}, {}),
    "alibi": ({"score_mod": scores.alibi}, {}),
    "documents": ({"mask_mod": masks.document}, {}),
    "window and softcap": ({"window": (20, 0), "softcap": 5.0}, {}),
    "sinks": ({}, {"sinks": F32}),
    "dropout": ({}, {"dropout": True}),
}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_masks_score_functions_sinks_and_dropout(arch, name):
    options, more = OPTIONS[name]
    check(wide(576, 512, True, more=more, **options), arch, 70, 50, heads=2, heads_kv=1)


def test_float16_and_several_batches_of_equal_heads():
    check(wide(264, 384, dtype=F16), "sm_90a", 70, 90, batches=2, heads=2, heads_kv=2)


@pytest.mark.parametrize("packed", [2, 16, 64])
def test_query_heads_of_one_key_head_share_a_tile(packed):
    spec = wide(576, 512, True, more={"packed": packed})
    check(spec, "sm_90a", 3, 100, heads=64, heads_kv=1)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_guess_that_was_too_low_is_made_good_by_both_warpgroups(seed):
    spec = wide(264, 320)
    stages = build.forward(spec, ARCHES["sm_90a"])[0]
    assert stages.plan.has("guessed maximum")
    case = Problem(spec, seqlen_q=100, seqlen_k=300)
    case.arrays["k"][..., 100:, :] *= 64
    equals_tile(spec, case, stages, (seed,))


def test_rows_that_are_not_aligned_take_the_portable_kernel():
    check(wide(264, 264, more={"aligned": False}), "sm_90a", 20, 40)


# The division by columns itself, on tiny shapes


def divided(spec, warps, across, stages=(1, 1), columns=16):
    kernel = forward(spec)
    candidate = Candidate(
        (("block_q", warps // across * ROOMY.mma[0]), ("block_kv", columns)),
        warps,
        tuple(zip(("k_tile", "v_tile"), stages, strict=True)),
        output_layouts(tile_names(kernel), warps // across, across),
    )
    assert not planner.judge(kernel, ROOMY, planner.head_dims(spec, ROOMY), candidate).rejection
    plan = planner.make(kernel, spec, ROOMY, candidate)
    return build.forward_with(spec, plan)


@pytest.mark.parametrize(("warps", "across"), [(2, 2), (4, 2), (4, 4), (8, 4)])
@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (2, 2)])
def test_warps_divide_the_columns_of_o(warps, across, stages):
    spec = Spec(16, 64, causal=True)
    case = Problem(spec, heads=2, heads_kv=1, seqlen_q=30, seqlen_k=50)
    equals_tile(spec, case, divided(spec, warps, across, stages), (0, 1))


def test_a_division_that_loses_warps_is_reported():
    spec = Spec(16, 64)
    stages = divided(spec, 4, 2)
    once = tuple(replace(item, copies=1) if item.copies > 1 else item for item in stages.machine.buffers)
    case = Problem(spec, seqlen_q=30, seqlen_k=50)
    arrays = {**case.arrays, **case.outputs(stages.plan.sizes)}
    with pytest.raises(Hazard, match="but 4 hold it"):
        machine.run(stages.machine.having(buffers=once), stages.plan, arrays, case.scalars, 0)


def test_copies_are_in_the_text_of_the_kernel():
    text = divided(Spec(16, 64), 4, 2).machine_text
    assert "register s: float32[block_q, block_kv] warps=2x1 in 2 copies" in text
    assert "register o_acc: float32[block_q, head_dim_v] warps=2x2\n" in text


# Values that are the first columns of the keys


def shared(spec, **sizes):
    case = Problem(spec, **sizes)
    case.arrays["v"] = case.arrays["k"][..., : spec.head_dim_v]
    return case


SHARED = {"shared_kv": True}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "lengths", "causal", "options"),
    [
        (576, 512, (70, 150), True, {}),
        (576, 512, (100, 300), False, {}),
        (576, 512, (100, 70), True, {"window": (20, 0)}),
        (512, 512, (65, 1), False, {"softcap": 5.0}),
        (272, 264, (64, 200), True, {"score_mod": scores.alibi}),  # values padded beyond the keys
        (576, 64, (70, 150), True, {}),
        (40, 40, (200, 300), True, {"mask_mod": masks.document}),
        (128, 72, (130, 400), False, {}),
        (576, 512, (3, 0), False, {}),
    ],
)
def test_values_are_read_from_the_tile_of_the_keys(arch, head_dim, head_dim_v, lengths, causal, options):
    spec = wide(head_dim, head_dim_v, causal, more=SHARED, **options)
    stages = build.forward(spec, ARCHES[arch])[0]
    names = {item.name for item in stages.machine.buffers}
    assert {"k", "k_tile"} <= names and not {"v", "v_tile"} & names and stages.plan.arch.name == arch
    case = shared(spec, heads=2, heads_kv=1, seqlen_q=lengths[0], seqlen_k=lengths[1])
    found = equals_tile(spec, case, stages, (0, 1))
    assert_close(found, case.dense(), BF16, ("o", "lse"))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("traits", [(), ("persistent",), ("dynamic", "in turns"), ("dynamic", "guessed maximum")])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(32, 16), (320, 264)])
def test_any_number_of_stages_of_keys_that_are_values(stages, traits, head_dim, head_dim_v):
    spec = wide(head_dim, head_dim_v, more=SHARED)
    chosen = build.forward(spec, ARCHES["sm_90a"])[0].plan.candidate
    depth = tuple((name, stages if name == "k_tile" else count) for name, count in chosen.stages)
    blocks = (chosen.blocks[0], ("block_kv", 16))
    candidate = replace(chosen, stages=depth, traits=traits, blocks=blocks)
    plan = planner.make(forward(spec), spec, ARCHES["sm_90a"], candidate)
    case = shared(spec, heads=2, heads_kv=1, seqlen_q=150, seqlen_k=130)
    equals_tile(spec, case, build.forward_with(spec, plan), (0, 1, 2))


@pytest.mark.parametrize("more", [{"packed": 32}, {"sinks": F32}, {"dropout": True}], ids=str)
def test_shared_values_beside_other_features(more):
    spec = wide(576, 512, more=more | SHARED)
    case = shared(spec, heads=32, heads_kv=1, seqlen_q=3, seqlen_k=100)
    found = equals_tile(spec, case, build.forward(spec, ARCHES["sm_90a"])[0])
    assert_close(found, case.dense(), BF16, ("o", "lse"))


@pytest.mark.parametrize("stages", [(1,), (2,)])
def test_the_copy_pipeline_of_keys_that_are_values(stages):
    spec = Spec(64, 64, causal=True, shared_kv=True)
    kernel = forward(spec)
    candidate = Candidate(
        (("block_q", 16), ("block_kv", 16)), 4, (("k_tile", *stages),), output_layouts(tile_names(kernel), 2, 2)
    )
    plan = planner.make(kernel, spec, ROOMY, candidate)
    case = shared(spec, heads=2, heads_kv=1, seqlen_q=30, seqlen_k=50)
    equals_tile(spec, case, build.forward_with(spec, plan), (0, 1))


def test_keys_that_are_released_before_they_are_values_are_reported(monkeypatch):
    spec = wide(320, 264, more=SHARED)
    monkeypatch.setattr(waits, "_read_later", lambda kernel: set())
    plan = build.forward(spec, ARCHES["sm_90a"])[0].plan
    kernel = lower.run(forward(spec), plan)
    case = shared(spec, seqlen_q=64, seqlen_k=400)
    with pytest.raises((Hazard, Deadlock)):
        machine.run(kernel, plan, {**case.arrays, **case.outputs(plan.sizes)}, case.scalars, 0)
