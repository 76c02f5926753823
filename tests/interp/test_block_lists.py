"""Kernels that walk lists of blocks, on both interpreters, against dense float64 attention; and how far they walk."""

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from block_lists import add_lists, block_mask, dense_mask, entries, expected
from functions import traced
from lowered_cases import Choice, compare, plans
from test_functions import tiled
from test_sm90 import equals_tile, lowered
from test_sm90_backward import equals_tile as backward_equals_tile
from test_sm90_backward import plan as backward_plan

from flashgen import build, lower, masks, trace
from flashgen.attention import backward as nests
from flashgen.interp import machine, tile
from flashgen.ir.dtype import BF16, F16
from flashgen.plan.arch import ARCHES
from flashgen.runtime.blocks import Request
from flashgen.spec import Spec

MASKS = ["document", "lengths", "visible", "by head", "of batches", "nothing", "left", None]


def listed(causal=False, mask=None, dims=(16, 8), dtype=BF16, score=None, **options):
    return Spec(*dims, dtype, listed=True, **traced(causal, mask, score), **options)


def test_the_name_of_a_listed_spec():
    spec = listed(True, "document", dims=(128, 128))
    assert str(spec) == "d128_bf16_causal_document_int_listed"
    assert str(replace(spec, listed=False)) == "d128_bf16_causal_document_int"


@pytest.mark.parametrize("lengths", [(37, 70), (70, 37), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_form_equals_dense_attention(mask, causal, lengths):
    """Ragged lengths, grouped heads, blocks larger and smaller than tiles; rows and keys whose lists are empty."""
    for deterministic, blocks in ((False, (8, 16)), (True, (24, 8))):
        problem = Problem(listed(causal, mask, deterministic=deterministic), 2, 4, 2, *lengths)
        add_lists(problem, problem.dims(*blocks))
        assert_close(tiled(problem, *blocks), problem.dense(), BF16)


def test_with_a_score_function_that_lifts_rows_behind_the_end():
    problem = Problem(listed(True, "document", score="far above"), 2, 4, 2, 37, 70)
    add_lists(problem, problem.dims(8, 16))
    assert_close(tiled(problem, 8, 16), problem.dense(), BF16)


@pytest.mark.parametrize("mask", ["document", "visible", "nothing"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("stages", [(1, 1), (2, 2)], ids=str)
def test_the_machine_form_of_the_portable_family(mask, causal, deterministic, stages):
    problem = Problem(listed(causal, mask, (16, 16), F16, deterministic=deterministic), 2, 2, 1, 37, 70)
    chosen = plans(problem, Choice(2, 1, 16, stages))
    add_lists(problem, chosen["attention_forward"].sizes)
    keys = problem.arrays["kv_list"]
    add_lists(problem, chosen["attention_backward"].sizes)
    problem.arrays["kv_list"] = keys
    compare(problem, chosen, seeds=(0, 1))


@pytest.mark.parametrize("mask", ["document", "visible", "nothing"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [1, 2])
def test_hoppers_forward(mask, causal, packed):
    """Persistent blocks: producer and computing warps walk the same lists, through stages that go round."""
    spec = listed(causal, mask, (16, 32), packed=packed)
    kernel, chosen = lowered(spec, warpgroups=2, traits=("dynamic", "in turns", "guessed maximum"))
    problem = Problem(spec, 2, 2, 1, 150, 400)
    add_lists(problem, chosen.sizes)
    equals_tile(spec, problem, kernel, chosen)


@pytest.mark.parametrize("mask", ["document", "nothing"])
def test_hoppers_forward_where_o_leaves_over_v(mask):
    """The first step of a tile is loaded apart from the others, as it waits for the O of the last tile."""
    spec = listed(True, mask, (256, 256))
    kernel, chosen = lowered(spec, warpgroups=2, block_kv=64)
    assert chosen.covered_by_output
    problem = Problem(spec, 1, 2, 1, 200, 200)
    add_lists(problem, chosen.sizes)
    equals_tile(spec, problem, kernel, chosen, seeds=(0,))


@pytest.mark.parametrize("mask", ["document", "lengths", "nothing"])
@pytest.mark.parametrize(("dims", "group"), [(64, 2), (128, 1), (192, 2)])
def test_hoppers_backward(mask, dims, group):
    spec = listed(True, mask, (dims, dims), deterministic=dims > 128)
    for nest in [nests.backward(spec), *([nests.backward_dq(spec)] if spec.deterministic else [])]:
        case = Problem(spec, 1, 2, 2 // group, 150, 200)
        add_lists(case, backward_plan(nest, spec).sizes)
        backward_equals_tile(case, nest, seeds=(0,))


@pytest.mark.parametrize("packed", [2, 4])
@pytest.mark.parametrize("mask", ["by head", "document"])
def test_a_tile_of_several_heads_sees_what_one_of_them_sees(mask, packed):
    problem = Problem(listed(False, mask, packed=packed), 2, 4, 1, 13, 70)
    add_lists(problem, problem.dims(16, 16), 16)
    arrays = problem.run_tile(16, 16, kernels=problem.kernels()[:1])
    assert_close(arrays, problem.dense(), BF16, ("o", "lse"))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tiles", [(16, 16), (64, 32), (48, 80)], ids=str)
def test_lists_where_blocks_divide_tiles(mask, tiles):
    problem = Problem(listed(True, mask), 2, 4, 2, 150, 170)
    shown = dense_mask(problem)
    found = block_mask(problem.spec, shown, 16)
    for request in (Request("kv_list", *tiles, 1), Request("kv_list", *tiles, 2), Request("q_list", *tiles, 2)):
        lists = found.list_for(request, None)
        assert lists.shape == found.shape(request) and lists.dtype == np.int32
        assert entries(lists) == expected(shown, request), request


@pytest.mark.parametrize("tiles", [(8, 24), (20, 12), (192, 80)], ids=str)
def test_lists_of_tiles_that_do_not_match_blocks_leave_nothing_out(tiles):
    """Of each tile with a visible element there is an entry; one that says that the tile is full is right."""
    problem = Problem(listed(True, "document"), 2, 2, 1, 150, 170)
    shown = dense_mask(problem)
    found = block_mask(problem.spec, shown, 16)
    for request in (Request("kv_list", *tiles, 1), Request("q_list", *tiles, 2)):
        for row, exact in zip(entries(found.list_for(request, None)), expected(shown, request), strict=True):
            assert {place for place, _ in exact} <= {place for place, _ in row}
            assert {place for place, partial in row if not partial} <= {
                place for place, partial in exact if not partial
            }


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("mask", ["document", "visible", "by head", "left"])
def test_the_kernel_that_counts(mask, block_size):
    problem = Problem(listed(True, mask), 2, 2, 1, 70, 150)
    expected_counts = block_mask(problem.spec, dense_mask(problem), block_size)._visible
    stages = build.block_counts(problem.spec, ARCHES["sm_90a"], block_size)
    batch, heads, rows, columns = expected_counts.shape
    for run in ("tile", "machine"):
        visible = np.full((batch, heads * rows, columns), np.nan, np.float32)
        arrays, scalars = {"visible": visible, **problem.aux}, problem.scalars | {"kv_blocks": columns}
        if run == "tile":
            tile.run(lower.tile(stages.tile), stages.plan.sizes, arrays, scalars)
        else:
            machine.run(stages.machine, stages.plan, arrays, scalars)
        np.testing.assert_array_equal(visible.reshape(expected_counts.shape), expected_counts)


def documents(count, seqlen, seed=0):
    """(1, seqlen) ids of documents of random lengths."""
    ends = np.sort(np.random.default_rng(seed).choice(np.arange(1, seqlen), count - 1, replace=False))
    return np.searchsorted(ends, np.arange(seqlen), side="right").astype(np.int32)[None]


def walked(spec, problem, blocks):
    """What the kernels of a problem compute and read, and the results."""
    counter = tile.Counter()
    kernels = [lower.tile(kernel) for kernel in problem.kernels()]
    return counter, problem.run_tile(*blocks, kernels=kernels, listener=counter)


def test_work_is_in_proportion_to_the_blocks_that_are_not_skipped():
    """16 documents in 4096 tokens: FLOPs are those of the listed blocks, and bytes follow them."""
    seqlen, block = 4096, 128
    mask = trace.mask(masks.document)
    ids = documents(16, seqlen)
    full, some = (Spec(16, 16, mask=mask, listed=flag) for flag in (False, True))
    every, problem = Problem(full, 1, 1, 1, seqlen, seqlen), Problem(some, 1, 1, 1, seqlen, seqlen)
    for case in (every, problem):
        case.arrays["mask_ids"] = case.aux["mask_ids"] = ids
    lists = add_lists(problem, problem.dims(block, block), 64)
    visited = int(problem.arrays["kv_list"][..., 0].sum())
    assert visited == int(problem.arrays["q_list"][..., 0].sum())
    blocks = (seqlen // block) ** 2
    assert visited < 0.25 * blocks and lists.density() < 0.25
    dense, arrays = walked(full, every, (block, block))
    sparse, listed_arrays = walked(some, problem, (block, block))
    assert sparse.flops * blocks == dense.flops * visited
    assert sparse.statements["Gemm"] * blocks == dense.statements["Gemm"] * visited
    assert sparse.global_bytes_read < 0.3 * dense.global_bytes_read
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(listed_arrays[name], arrays[name], rtol=2e-2, atol=2e-2)
