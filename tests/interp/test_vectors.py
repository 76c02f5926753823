"""Hopper's forward where functions read arrays by row or column alone: vectors, against the tile form."""

import numpy as np
import pytest
from attention_cases import Problem
from block_lists import add_lists
from functions import traced
from test_sm90 import ALL, equals_tile, lowered

from flashgen import variants
from flashgen.ir.expr import Load, walk
from flashgen.ir.visit import statements
from flashgen.machine.sm90 import HoldColumns, MapAsking
from flashgen.spec import Spec

LARGE = 1 << 24  # from here on float32 does not tell neighbours apart


def ranked(b, h, q_idx, kv_idx, rank):
    """Three loads by column from one array, one of them behind its end for the last keys, and one by row."""
    return (rank[b, q_idx] >= rank[b, kv_idx]) & (rank[b, kv_idx] != rank[b, kv_idx + 1]) & (rank[b, kv_idx] > LARGE)


def of_keys(score, b, h, q_idx, kv_idx, table, kind):
    """A number of the kind of a key, and the same of the query by one that is the same for a tile."""
    return score + table[kind[kv_idx], h] - table[kind[q_idx], 0] * table[0, h]


FUNCTIONS = {"ranked": (ranked, None), "of keys": (None, of_keys), "both": (ranked, of_keys)}


def case(name, causal, lengths, **options):
    mask, score = FUNCTIONS[name]
    _, traced_mask, traced_score = variants.functions(causal, mask_mod=mask, score_mod=score)
    spec = Spec(16, 32, causal=causal, mask=traced_mask, score=traced_score, **options)
    draw, seqlen = np.random.default_rng(0), max(lengths)
    given = {
        "mask_rank": (LARGE + draw.integers(0, 4, (2, seqlen))).astype(np.int32),
        "score_table": draw.standard_normal((3, 2)).astype(np.float32),
        "score_kind": draw.integers(0, 3, seqlen).astype(np.int32),
    }
    return spec, Problem(spec, 2, 2, 1, *lengths, given={item.name: given[item.name] for item in spec.arrays})


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("traits", [ALL, ("dynamic",)], ids=["guess", "plain"])
def test_vectors_hold_what_was_loaded_by_element(name, causal, traits):
    """Widths that are no multiple of the 64 columns that a warp holds at a time, and ragged lengths."""
    for block_kv, lengths in ((80, (150, 210)), (64, (100, 70))):
        spec, problem = case(name, causal, lengths)
        kernel, chosen = lowered(spec, warpgroups=2, block_kv=block_kv, traits=traits)
        assert any(isinstance(stmt, MapAsking) for stmt in statements(kernel.body))
        equals_tile(spec, problem, kernel, chosen, seeds=(0,))


def test_every_load_has_a_vector():
    """Of the four by column two are the same; what is loaded for an index is a part of the load."""
    spec, _ = case("both", True, (150, 210))
    kernel, _ = lowered(spec, warpgroups=2, traits=ALL)
    assert {buffer.name for buffer in kernel.buffers if buffer.by_column} == {
        "mask_rank_columns",
        "mask_rank_columns_1",
        "score_table_columns",
    }
    holds = [stmt.dst for stmt in statements(kernel.body) if isinstance(stmt, HoldColumns)]
    assert sorted(holds) == sorted(2 * [buffer.name for buffer in kernel.buffers if buffer.by_column])
    arrays = {item.name for item in spec.arrays}
    asking = [stmt for stmt in statements(kernel.body) if isinstance(stmt, MapAsking)]
    loaded = [node for stmt in asking for node in walk(stmt.expr) if isinstance(node, Load) and node.buffer in arrays]
    assert {str(node.index[0]) for node in loaded} == {"Const(value=0)"}  # only what is the same for all elements


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_that_has_seen_no_key_is_no_reason_to_do_a_step_again(causal):
    """Two documents that meet within a tile of queries: keys of the first are hidden from the rows of the second."""
    spec = Spec(16, 16, listed=True, **traced(causal, "document"))
    kernel, chosen = lowered(spec, warpgroups=2, traits=ALL)
    ids = (np.arange(640) >= 600).astype(np.int32)[None]
    problem = Problem(spec, 1, 1, 1, 640, 640, given={"mask_ids": ids})
    add_lists(problem, chosen.sizes)
    (trace,) = equals_tile(spec, problem, kernel, chosen, seeds=(0,))
    again = trace.statements["Rescore"]
    # The last tile has 10 steps; its rows of the second document, of 3 warps, see nothing in 8 of them or more.
    assert 3 <= again < 3 * 3
