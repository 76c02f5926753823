"""Heads that share a tile of queries, by both interpreters against dense attention in float64."""

from dataclasses import replace

import pytest
from attention_cases import assert_close
from test_sm90 import ARCH, equals_tile, lowered, problem, run

from flashgen import lower
from flashgen.attention.forward import forward
from flashgen.interp import machine, tile
from flashgen.interp.common import Hazard
from flashgen.ir.dtype import F16
from flashgen.spec import Spec

NAMES = ("o", "lse")


def by_tile(spec, case, sizes, listener=None):
    arrays = {**case.arrays, **case.outputs(sizes)}
    tile.run(lower.tile(forward(spec)), sizes, arrays, case.scalars, listener)
    return arrays


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [2, 4, 8])
@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ((1, 70), 1),
        ((3, 3), 2),  # two blocks of heads to a key head
        ((17, 100), 1),  # the last positions of a tile do not exist
        ((64, 65), 1),
        ((70, 30), 1),  # causal: rows that see no key
        ((130, 200), 1),  # several blocks of queries
        ((5, 0), 1),
    ],
)
def test_packed_kernels_equal_dense_attention(causal, packed, lengths, groups):
    spec = Spec(16, 16, causal=causal, packed=packed)
    case = problem(spec, *lengths, batches=2, heads=2 * groups * packed, heads_kv=2)
    expected = case.dense()
    for warpgroups in (1, 2):
        kernel, chosen = lowered(spec, warpgroups=warpgroups)
        assert_close(by_tile(spec, case, chosen.sizes), expected, spec.dtype, NAMES)
        assert_close(run(kernel, chosen, case, seed=warpgroups), expected, spec.dtype, NAMES)


@pytest.mark.parametrize("packed", [16, 32, 64])
@pytest.mark.parametrize("warpgroups", [1, 2])
def test_many_heads(packed, warpgroups):
    """Down to one position of each."""
    spec = Spec(16, 16, causal=True, packed=packed)
    kernel, chosen = lowered(spec, warpgroups=warpgroups)
    case = problem(spec, 5, 90, heads=packed, heads_kv=1)
    assert_close(run(kernel, chosen, case), case.dense(), spec.dtype, NAMES)


TRAITS = [(), ("persistent",), ("dynamic", "in turns"), ("dynamic", "in turns", "guessed maximum")]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("traits", TRAITS, ids=" ".join)
def test_every_order_of_tiles(causal, traits):
    spec = Spec(40, 72, dtype=F16, causal=causal, packed=4)
    kernel, chosen = lowered(spec, warpgroups=2, traits=traits)
    case = problem(spec, 50, 130, batches=2, heads=16, heads_kv=2)
    equals_tile(spec, case, kernel, chosen)
    assert_close(run(kernel, chosen, case), case.dense(), spec.dtype, NAMES)


def test_keys_are_read_once_for_the_heads_of_a_tile():
    """The bytes and the tiles of a decoding step."""
    read, tiles = {}, {}
    for packed in (1, 8):
        spec = Spec(16, 16, packed=packed)
        kernel, chosen = lowered(spec)
        case = problem(spec, 1, 256, batches=3, heads=16, heads_kv=2)
        counter = tile.Counter()
        by_tile(spec, case, chosen.sizes, counter)
        trace = machine.run(kernel, chosen, {**case.arrays, **case.outputs(chosen.sizes)}, case.scalars)
        assert trace.global_bytes_read == counter.global_bytes_read
        read[packed], tiles[packed] = trace.global_bytes_read, trace.statements["AskTile"]
    queries, keys = 3 * 16 * 16 * 2, 3 * 2 * 256 * 2 * 16 * 2
    assert read == {1: queries + 8 * keys, 8: queries + keys}
    assert tiles == {1: 3 * 16, 8: 3 * 2}


def test_heads_that_do_not_exist_are_a_hazard():
    """The hardware would clip them at the end of the tensor, but take those of the next key head before."""
    spec = Spec(16, 16, packed=8)
    kernel, chosen = lowered(spec, traits=())
    case = problem(spec, 1, 64, heads=12, heads_kv=1)
    heads = case.scalars | {"heads": 16}
    with pytest.raises(Hazard, match="has no batch 0, head 15"):
        machine.run(kernel, chosen, {**case.arrays, **case.outputs(chosen.sizes)}, heads)


def test_the_order_of_the_longest_first_keeps_sections_of_heads():
    """So many keys that a section has the heads of one key head alone; every tile is still taken once."""
    spec = Spec(16, 16, causal=True, packed=2)
    kernel, chosen = lowered(spec, arch=ARCH)
    case = problem(spec, 70, 100, batches=2, heads=8, heads_kv=2)
    assert_close(run(kernel, chosen, case), case.dense(), spec.dtype, NAMES)
    crowded = replace(chosen, keys_in_cache=100)
    narrow = lower.run(forward(spec), crowded)
    assert_close(run(narrow, crowded, case), case.dense(), spec.dtype, NAMES)
