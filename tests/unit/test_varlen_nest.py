"""The loop nests of packed sequences: how blocks are numbered, where windows end; other nests stay as they are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.attention import backward, forward
from flashgen.interp.common import Uniform, evaluate
from flashgen.ir.expr import Const, Search
from flashgen.ir.nodes import Copy, Let, Window
from flashgen.ir.visit import statements
from flashgen.spec import Spec

NESTS = {
    "forward": forward.forward,
    "delta": backward.delta,
    "backward": backward.backward,
    "convert_dq": backward.convert_dq,
    "backward_dq": backward.backward_dq,
}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.sampled_from((1, 3, 8, 16)))
def test_every_block_of_every_sequence_has_one_number(lengths, rows):
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    count, total = len(lengths), sum(lengths)
    blocks = min(total, 1) * (total // rows + count)
    found = {}
    for block in range(blocks):
        search = Search("offsets", Const(count), Const(rows), Const(block))
        sequence = evaluate(search, Uniform({}, {"offsets": offsets}))
        place = block - (int(offsets[sequence]) // rows + sequence)
        assert place >= 0
        if place * rows < lengths[sequence]:
            found[sequence, place] = found.get((sequence, place), 0) + 1
        # Workspaces have room for a whole block, which belongs to nobody else.
        assert (int(offsets[sequence]) // rows + sequence + place) * rows == block * rows
    wanted = {(sequence, n) for sequence, length in enumerate(lengths) for n in range(-(-length // rows))}
    assert found == dict.fromkeys(wanted, 1)
    assert blocks - len(found) <= count


@pytest.mark.parametrize("name", NESTS)
def test_windows_end_with_their_sequence_but_for_whole_blocks_of_workspaces(name):
    spec = Spec(64, 64, varlen=True, used=True, deterministic=name == "backward_dq")
    kernel = NESTS[name](spec)
    assert kernel.axes[0].name == "row_block" and len(kernel.axes) == 2
    for stmt in statements(kernel.body):
        for place in (*stmt.reads(), *stmt.writes()):
            if not isinstance(place, Window):
                continue
            whole = place.buffer == "dq_workspace" or (place.buffer in ("lse_log2", "delta") and name != "backward_dq")
            assert (place.rows is None) == whole, (stmt, place)
            assert place.origin[0] == Const(0)


def test_gradients_are_stored_for_keys_that_are_not_used():
    kernel = backward.backward(Spec(64, 64, varlen=True, used=True))
    ends = {
        place.buffer: str(place.rows)
        for stmt in statements(kernel.body)
        if isinstance(stmt, Copy)
        for place in (stmt.dst, stmt.src)
        if isinstance(place, Window) and place.rows is not None
    }
    assert all("length_k" in ends[name] for name in ("dk", "dv"))
    assert all("seqlen_k" in ends[name] for name in ("k", "v"))


@pytest.mark.parametrize("name", ["delta", "convert_dq"])
def test_what_has_no_keys_takes_no_offsets_of_keys(name):
    kernel = NESTS[name](Spec(64, 64, varlen=True))
    names = {item.name for item in kernel.buffers}
    assert "cu_seqlens_q" in names and not {"cu_seqlens_k", "seqused_k"} & names
    assert not any("k_begin" in stmt.assigns() for stmt in kernel.body if isinstance(stmt, Let))


@pytest.mark.parametrize("name", NESTS)
def test_other_specs_keep_their_nest(name):
    spec = Spec(64, 64, deterministic=name == "backward_dq")
    assert NESTS[name](spec) == NESTS[name].__wrapped__(spec)
    assert str(Spec(64, 64, varlen=True, used=True)) == "d64_bf16_varlen_used"
