"""Heads that share a tile: how many, what the planner makes of it, and how TMA sees their rows."""

import pytest

from flashgen import build, catalog, masks, variants
from flashgen.ir.dtype import F32, I32
from flashgen.ir.visit import heads_in_tile
from flashgen.machine.sm90_facts import box
from flashgen.plan.arch import ARCHES
from flashgen.plan.packing import fullness, heads_to_pack
from flashgen.spec import Spec

COUNTS = (2, 4, 8, 16, 32, 64)


def rows(packed):
    return 192 if packed == 1 else 128


@pytest.mark.parametrize(
    ("seqlen_q", "group", "packed"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (1, 8, 8),
        (1, 64, 64),
        (1, 128, 64),  # 64 of them, twice
        (1, 3, 1),  # no power of two divides it
        (1, 6, 2),
        (1, 12, 4),
        (17, 16, 16),  # tiles of 8 queries are fuller than of 16 or 32, of which there would be as many
        (16, 16, 8),  # 16 queries of 8 heads are full: no more heads are needed
        (64, 2, 2),
        (64, 16, 2),
        (129, 4, 4),
        (192, 8, 1),  # full already
        (180, 8, 1),  # nearly
        (4096, 8, 1),
        (4097, 8, 1),
        (0, 8, 1),
    ],
)
def test_the_fullest_tiles_with_the_fewest_heads(seqlen_q, group, packed):
    assert heads_to_pack(seqlen_q, group, rows) == packed


def test_it_packs_where_tiles_of_one_head_are_less_than_nine_tenths_as_full():
    for seqlen_q in range(1, 600):
        packed = heads_to_pack(seqlen_q, 32, rows)
        best = max(fullness(seqlen_q, 128 // count) for count in (2, 4, 8, 16, 32))
        assert (packed > 1) == (fullness(seqlen_q, 192) < 0.9 * best)
        assert packed == 1 or fullness(seqlen_q, 128 // packed) == best


def test_what_has_no_room_in_a_tile_of_several_heads_is_not_packed():
    assert heads_to_pack(1, 8, lambda packed: 64 if packed == 1 else 0) == 1
    assert heads_to_pack(1, 8, lambda packed: 64 if packed <= 2 else 0) == 2


def test_functions_that_load_much_are_planned_for_few_queries():
    def places(score, b, h, q_idx, kv_idx, table, ids):
        both = table[(ids[b, q_idx] + ids[b, kv_idx]) % 5, h]
        return score * (1.0 + 0.1 * table[ids[b, q_idx], h]) + table[ids[b, kv_idx], h] + both * 0.5

    _, mask, score = variants.functions(False, mask_mod=masks.document, score_mod=places, score_dtypes=(F32, I32))
    spec, hopper = Spec(64, 64, mask=mask, score=score), ARCHES["sm_90a"]
    suited = build.for_sizes(spec, hopper, 1, 100, 2)
    assert build.forward(suited, hopper)[0].plan.packed == suited.packed


def test_only_the_forward_of_hopper_packs():
    assert build.heads_to_pack(Spec(128, 128), ARCHES["sm_90a"], 1, 8) == 8
    assert build.heads_to_pack(Spec(128, 128, aligned=False), ARCHES["sm_90a"], 1, 8) == 1
    packed = Spec(64, 64, causal=True, packed=8)
    for arch in catalog.COMPILED:
        assert build.heads_to_pack(Spec(64, 64), arch, 1, 8) == (8 if arch == catalog.HOPPER else 1)
        for name, stages in build.everything(packed, arch).items():
            own = arch == catalog.HOPPER and name == "attention_forward"
            assert stages.plan.packed == heads_in_tile(stages.machine) == (8 if own else 1)


@pytest.mark.parametrize("packed", COUNTS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (40, 40)])
def test_the_rows_of_a_warpgroup_are_a_box(dims, packed):
    stages = build.forward(Spec(*dims, packed=packed), catalog.HOPPER)[0]
    sizes = stages.plan.sizes
    positions = sizes["block_q"] // packed
    assert box(stages.machine, "q", sizes) == (positions, packed)
    assert box(stages.machine, "o", sizes) == (min(positions, 64), max(64 // positions, 1))
    assert box(stages.machine, "k", sizes) == (sizes["block_kv"], 1)
    assert f"{packed} query heads share a tile, {positions} queries of each" in stages.plan.text()


def test_tiles_whose_warpgroups_would_hold_parts_of_heads_are_rejected():
    plan = build.forward(Spec(64, 64, packed=4), catalog.HOPPER)[0].plan
    tall = [verdict for verdict in plan.verdicts if dict(verdict.candidate.blocks)["block_q"] == 192]
    assert tall and all("192 rows of 4 heads" in verdict.rejection for verdict in tall)
    assert plan.sizes["block_q"] == 128


def test_explain_says_that_calls_may_pack():
    sentence = "heads share a tile (--packed shows it)"
    assert sentence in build.forward(Spec(128, 128), catalog.HOPPER)[0].plan.explain()
    assert sentence not in build.forward(Spec(128, 128), ARCHES["sm_80"])[0].plan.explain()
    measured = build.forward(Spec(128, 128, packed=2), catalog.HOPPER)[0].plan
    assert sentence not in measured.explain() and measured.source.endswith("with one head in a tile")


def test_the_number_of_heads_is_a_power_of_two():
    for packed in (0, 3, 12, 128):
        with pytest.raises(ValueError, match=f"packed = {packed} must be a power of two up to 64"):
            Spec(64, 64, packed=packed)
    assert str(Spec(64, 64, causal=True, packed=16)) == "d64_bf16_causal_packed16"
