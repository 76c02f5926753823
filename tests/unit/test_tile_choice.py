"""Which arrays of score functions are copied by tiles: by how they are read, by how they lie, and by what has room."""

import logging
import math
import struct
from dataclasses import replace

import pytest
from test_host_cost import launched  # noqa: F401
from tile_scores import OUTER, READING, score

import flashgen
from flashgen import build, trace
from flashgen.attention import tiles
from flashgen.ir.dtype import BF16, F16, F32
from flashgen.plan.arch import ARCHES, parse_arch
from flashgen.runtime import tensormap
from flashgen.runtime import tiles as runtime
from flashgen.spec import Spec

torch = pytest.importorskip("torch")
HOPPER = parse_arch("sm_90a")


def names(function, dtypes=(BF16,), **more):
    return [item.name for item in tiles.fit(Spec(64, 64, score=trace.score(function, dtypes), **more))]


@pytest.mark.parametrize("name", OUTER)
def test_what_is_read_by_query_and_key_is_a_tile(name):
    found = tiles.fit(Spec(64, 64, score=score(name)))
    assert [item.rank - 2 for item in found] == [len(outer) for outer in OUTER[name]]


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q_idx, kv_idx, x: score + x[b, h, kv_idx, q_idx],
        lambda score, b, h, q_idx, kv_idx, x: score + x[h, q_idx - kv_idx],
        lambda score, b, h, q_idx, kv_idx, x: score + x[h, q_idx, kv_idx + 1],
        lambda score, b, h, q_idx, kv_idx, x: score + x[h, q_idx, 0],
        lambda score, b, h, q_idx, kv_idx, x: score + x[kv_idx],
        lambda score, b, h, q_idx, kv_idx, x: score + x[q_idx, q_idx, kv_idx],
        lambda score, b, h, q_idx, kv_idx, x: score + x[0, 0, h, q_idx, kv_idx],
        lambda score, b, h, q_idx, kv_idx, x: score + x[0, q_idx, kv_idx] + x[1, q_idx, kv_idx],
    ],
)
def test_anything_else_is_read_by_element(function):
    assert names(function) == []


def test_types_and_specs_without_tiles():
    assert names(READING["of_both"], (F16,)) == ["score_x"]
    assert names(READING["of_both"], (F32,)) == []
    assert names(READING["of_both"], packed=4) == names(READING["of_both"], varlen=True) == []
    assert names(READING["two"], (BF16, F32)) == ["score_x"]
    indirect = lambda score, b, h, q_idx, kv_idx, x, of: score + x[of[h], q_idx, kv_idx]  # noqa: E731
    assert names(indirect, (BF16, flashgen.ir.dtype.I32)) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_only_hopper_copies_them(arch):
    spec = Spec(64, 64, score=score("of_both"), tiled=True)
    for stages in build.everything(spec, ARCHES[arch]).values():
        assert "aux_" not in stages.tile_text


def test_what_the_derivative_reads_is_read_by_element_in_the_backward():
    for name, copied in (("of_both", True), ("of_none", False)):
        made = build.everything(Spec(64, 64, score=score(name), tiled=True), HOPPER)
        assert "aux_x_tile" in made["attention_forward"].machine_text
        assert ("aux_x_tile" in made["attention_backward"].machine_text) is copied


def test_tiles_without_room_are_left_to_elements(caplog):
    """Five of them at head_dim 256: the kernel stays one of Hopper's."""
    five = lambda score, b, h, q_idx, kv_idx, x, y, z, v, w: sum(  # noqa: E731
        (item[q_idx, kv_idx] for item in (x, y, z, v, w)), start=score
    )
    spec = Spec(256, 256, score=trace.score(five, (BF16,) * 5), tiled=True)
    with caplog.at_level(logging.INFO, "flashgen"):
        kept = build.with_room(spec, HOPPER)
    assert kept == replace(spec, tiled=False) and "read element by element" in caplog.text
    fitting = Spec(256, 256, score=score("of_both"), tiled=True)
    assert build.with_room(fitting, HOPPER) == fitting


LAYOUTS = {  # shape, strides, first element, and why it is no array of tiles
    "contiguous": ((2, 4, 64, 128), (32768, 8192, 128, 1), 0, ""),
    "of all heads": ((2, 4, 64, 128), (0, 0, 128, 1), 0, ""),
    "larger": ((2, 4, 66, 128), (54400, 13600, 136, 1), 552, ""),
    "overlapping": ((2, 4, 64, 128), (8, 16, 8, 1), 0, ""),
    "rows apart": ((2, 4, 64, 128), (33280, 8320, 130, 1), 0, "rows 130 elements apart"),
    "one row": ((2, 4, 64, 128), (512, 128, 0, 1), 0, "rows 0 elements apart"),
    "few rows": ((2, 4, 1, 128), (512, 128, 128, 1), 0, "has 1 x 128 elements for 64 queries and 128 keys"),
    "few columns": ((2, 4, 64, 8), (2048, 512, 8, 1), 0, "has 64 x 8 elements"),
    "transposed": ((2, 4, 64, 128), (32768, 8192, 1, 64), 0, "not contiguous along its last axis"),
    "heads apart": ((2, 4, 64, 128), (32784, 8196, 128, 1), 0, "matrices that are no multiple of 16 bytes"),
    "shifted": ((2, 4, 64, 128), (32768, 8192, 128, 1), 4, "not 16-byte aligned"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_an_array_lies_decides(launched, caplog, layout):  # noqa: F811
    """Its address is in the launch either way; a sentence says why it is read by element."""
    shape, strides, first, reason = LAYOUTS[layout]
    array = torch.zeros(2**18, dtype=torch.bfloat16)[first:].as_strided(shape, strides, first)
    q, k = torch.randn(2, 64, 4, 64).bfloat16(), torch.randn(2, 128, 4, 64).bfloat16()
    kernel = flashgen.compile(64, False, score_mod=READING["of_both"], arch="sm_90a").resolve(None, (array,))[0]
    kernel._bound.clear()
    with caplog.at_level(logging.INFO, "flashgen"):
        kernel(q, k, k, score_aux=(array,))
    (call,) = kernel._bound.values()
    (bound,) = call.launches
    assert ("aux_x_tile" in bound.program.stages.machine_text) is not bool(reason)
    assert (reason in caplog.text and "score_aux's x" in caplog.text) if reason else "element" not in caplog.text
    assert array.data_ptr().to_bytes(8, "little") in launched[-1]


def test_what_a_kernel_is_told_of_an_array():
    """Axes with a stride of zero have one place; missing axes too."""
    spec = Spec(64, 64, score=score("of_both"))
    layout = (0, 2**33, 136, 1, 1, 3, 99, 127)
    assert runtime.scalars(spec, {"score_x": layout}) == {"aux_x_tile_last0": 0, "aux_x_tile_last1": 3}
    found = runtime.tensor_map("bfloat16", layout, (64, 192, 1))
    assert (found.sizes, found.strides, found.box) == ((128, 100, 4, 1), (136, 2**33, 0), (64, 192, 1))
    flat = runtime.tensor_map("float16", (128, 1, 63, 127), (64, 64, 1))
    assert (flat.sizes, flat.strides) == ((128, 64, 1, 1), (128, 0, 0))
    assert flat._described[1][:] == [256, 16, 16]


def test_the_last_indices_reach_the_launch(launched):  # noqa: F811
    q, k = torch.randn(3, 64, 4, 64).bfloat16(), torch.randn(3, 64, 4, 64).bfloat16()
    array = torch.zeros(1, 4, 64, 64).bfloat16().expand(3, 4, 64, 64)
    kernel = flashgen.compile(64, False, score_mod=READING["of_both"], arch="sm_90a").resolve(None, (array,))[0]
    kernel(q, k, k, score_aux=(array,))
    assert struct.pack("<fii", 1 / math.sqrt(64), 0, 3) in launched[-1]


def test_maps_of_an_array_are_made_for_its_box(launched, monkeypatch):  # noqa: F811
    boxes = []
    real = tensormap.TensorMap.at
    monkeypatch.setattr(tensormap.TensorMap, "at", lambda self, address: boxes.append(self.box) or real(self, address))
    q, k = torch.randn(1, 64, 4, 64).bfloat16(), torch.randn(1, 128, 4, 64).bfloat16()
    array = torch.zeros(4, 64, 128).bfloat16()
    of = lambda score, b, h, q_idx, kv_idx, x: score + x[h, q_idx, kv_idx]  # noqa: E731
    kernel = flashgen.compile(64, False, score_mod=of, arch="sm_90a")
    kernel(q, k, k, score_aux=(array,))
    sizes = build.forward(replace(kernel.resolve(None, (array,))[0].spec, tiled=True), HOPPER)[0].plan.sizes
    assert boxes[-1] == (64, sizes["block_q"], 1)


def test_few_queries_share_a_tile_and_many_do_not():
    """Heads that share a tile read by element: that is for decoding."""
    spec = Spec(128, 128, causal=True, score=score("of_both"), tiled=True)
    packed = [build.heads_to_pack(spec, HOPPER, queries, 8) for queries in (1, 64, 65, 300)]
    assert packed[0] == 8 and packed[1] > 1 and packed[2:] == [1, 1]
    assert build.heads_to_pack(replace(spec, tiled=False), HOPPER, 65, 8) > 1
    (made,) = build.forward(replace(spec, packed=8), HOPPER)
    assert "aux_" not in made.machine_text
