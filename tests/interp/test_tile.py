"""The tile interpreter against dense float64 attention, and its counter against closed formulas."""

import itertools

import numpy as np
import pytest
from attention_cases import Problem, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.attention import forward
from flashgen.interp import lanes, tile
from flashgen.interp.common import Hazard
from flashgen.ir.dtype import BF16, F16, F32, I32
from flashgen.ir.expr import Const, I, J, Load, Var, ceil_div, load, select
from flashgen.ir.nodes import (
    Axis,
    Buffer,
    Copy,
    Fill,
    For,
    If,
    Kernel,
    Let,
    Level,
    Map,
    Note,
    Scalar,
    Space,
    Tile,
    Window,
)
from flashgen.spec import Spec

LENGTHS = [(1, 1), (8, 8), (13, 21), (21, 13), (17, 1), (1, 17), (16, 32)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward_match_dense_attention(lengths, causal, deterministic):
    spec = Spec(16, 24, BF16, causal, deterministic)
    problem = Problem(spec, 2, 4, 2, *lengths)
    assert_close(problem.run_tile(8, 16), problem.dense(), BF16)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 4), (6, 2)])
@pytest.mark.parametrize("head_dims", [(8, 8), (40, 16), (8, 24)])
def test_groups_types_and_padded_head_dims(dtype, heads, head_dims):
    problem = Problem(Spec(*head_dims, dtype, causal=True), 1, *heads, 19, 23)
    assert_close(problem.run_tile(16, 8, multiple=16), problem.dense(), dtype)


@pytest.mark.parametrize("sizes", list(itertools.product([0, 2], [0, 5], [0, 5])))
def test_empty_problems_give_empty_or_zero_results(sizes):
    batches, seqlen_q, seqlen_k = sizes
    problem = Problem(Spec(8, 8), batches, 2, 1, seqlen_q, seqlen_k)
    assert_close(problem.run_tile(), problem.dense(), BF16)


def test_rows_without_keys_give_zero_and_minus_infinity():
    problem = Problem(Spec(8, 8, causal=True), 1, 1, 1, 20, 4)
    arrays = problem.run_tile()
    assert np.all(arrays["o"][:, :, :16] == 0) and np.all(arrays["lse"][:, :, :16] == -np.inf)
    assert np.all(arrays["dq"][:, :, :16] == 0) and np.isfinite(arrays["dk"]).all()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_spec_and_shape(data):
    draw = data.draw
    dims = st.sampled_from([8, 16, 24, 40])
    heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    spec = Spec(draw(dims), draw(dims), draw(st.sampled_from([BF16, F16])), draw(st.booleans()), draw(st.booleans()))
    length = st.integers(0, 40)
    problem = Problem(spec, draw(st.integers(1, 2)), heads_kv * group, heads_kv, draw(length), draw(length))
    block = st.sampled_from([8, 16])
    assert_close(problem.run_tile(draw(block), draw(block), draw(block)), problem.dense(), spec.dtype)


def test_non_contiguous_arrays_are_read_and_written():
    problem = Problem(Spec(8, 8), 2, 4, 2, 13, 9)
    for name in ("q", "k", "v", "dout"):
        problem.arrays[name] = np.ascontiguousarray(problem.arrays[name].swapaxes(1, 2)).swapaxes(1, 2)
    dims = problem.dims()
    arrays = {**problem.arrays, **problem.outputs(dims)}
    arrays["o"] = np.full((2, 13, 4, 8), np.nan, np.float32).swapaxes(1, 2)
    tile.run(problem.kernels()[0], dims, arrays, problem.scalars)
    assert_close(arrays, problem.dense(), BF16, ("o", "lse"))


def test_results_do_not_depend_on_how_many_heads_run_at_once(monkeypatch):
    problem = Problem(Spec(16, 16, causal=True), 2, 6, 3, 21, 30)
    together = problem.run_tile()
    monkeypatch.setattr(lanes, "WORKING_SET", 1)
    alone = problem.run_tile()
    for name in ("o", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(together[name], alone[name])


def test_inputs_are_left_alone():
    problem = Problem(Spec(8, 8), 2, 2, 2, 8, 8)  # whole tiles: nothing forces a copy
    before = {name: array.copy() for name, array in problem.arrays.items()}
    problem.run_tile()
    for name, array in before.items():
        np.testing.assert_array_equal(problem.arrays[name], array)


def test_the_counter_agrees_with_closed_formulas():
    problem = Problem(Spec(16, 24), 2, 4, 2, 21, 37)
    counter = tile.Counter()
    problem.run_tile(8, 16, 16, counter, [forward.forward(problem.spec)])
    heads, q_blocks, kv_blocks = 2 * 4, 3, 3
    q_bytes, o_bytes, lse_bytes = 21 * 16 * 2, 21 * 24 * 2, 21 * 4
    kv_bytes = 37 * (16 + 24) * 2
    assert counter.global_bytes_read == heads * (q_bytes + q_blocks * kv_bytes)
    assert counter.global_bytes_written == heads * (o_bytes + lse_bytes)
    assert counter.flops == heads * q_blocks * kv_blocks * 2 * 8 * 16 * (16 + 32)
    assert counter.statements["Gemm"] == q_blocks * kv_blocks * 2


def test_batch_and_head_are_vectorised():
    for kernel in Problem(Spec(8, 8)).kernels():
        expected = {"batch", "head_kv"} if kernel.name == "attention_backward" else {"batch", "head"}
        assert lanes.vectorisable(kernel) == expected, kernel.name


def hand_made(body, *, seqlen="seqlen", buffers=()):
    """A kernel on x and y of (batches, heads, seqlen, width), in tiles of rows x width."""
    shape = ("batches", "heads", seqlen, "width")
    names = [Buffer(name, shape, F32, Space.GLOBAL) for name in ("x", "y")]
    names += [
        Buffer("x_tile", ("rows", "width"), F32, Space.SHARED),
        Buffer("t", ("rows", "width"), F32, Space.REGISTER),
    ]
    names += [Buffer("r", ("rows",), F32, Space.REGISTER), *buffers]
    axes = (
        Axis("block", ceil_div(Var("seqlen"), Var("rows"))),
        Axis("head", Var("heads")),
        Axis("batch", Var("batches")),
    )
    scalars = tuple(Scalar(name, I32) for name in ("seqlen", "heads", "batches"))
    return Kernel("hand_made", Level.TILE, scalars, axes, tuple(names), tuple(body))


def here(name):
    return Window(name, (Var("batch"), Var("head"), Var("block") * Var("rows")))


def run_hand_made(kernel, seqlen=6, heads=2, batches=3, **extra):
    x = np.random.default_rng(0).standard_normal((batches, heads, seqlen, 4)).astype(np.float32)
    arrays = {"x": x, "y": np.full_like(x, np.nan), **extra}
    tile.run(kernel, {"rows": 4, "width": 4}, arrays, {"seqlen": seqlen, "heads": heads, "batches": batches})
    return x, arrays["y"]


def test_control_flow_lets_and_notes():
    step, odd = Var("step"), (Var("step") % 2).equals(1)
    body = (
        Copy("x_tile", here("x")),
        Map("t", load("x_tile", I, J)),
        Note(note="steps 1 and 3 add; the bound is tightened by a pass"),
        Let("last", (Var("block") + 5) // 2 + 2),
        For("step", Const(0), Const(4), (If(odd, (Map("t", load("t", I, J) + step),)),)),
        Map("t", load("t", I, J) * Var("last")),
        Copy(here("y"), "t"),
    )
    x, y = run_hand_made(hand_made(body))
    last = np.array([4, 4, 4, 4, 5, 5], np.float32)[:, None]
    np.testing.assert_allclose(y, (x + 4) * last, rtol=1e-6)


def test_branches_on_the_head_are_looped_over():
    body = (Copy("t", here("x")), If(Var("head").equals(1), (Fill("t", Const(7.0)),)), Copy(here("y"), "t"))
    kernel = hand_made(body)
    assert lanes.vectorisable(kernel) == {"batch"}
    x, y = run_hand_made(kernel)
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    assert np.all(y[:, 1] == 7)


def test_maps_see_batch_head_transposes_and_auxiliary_arrays():
    batch, head, row = Var("batch"), Var("head"), Var("block") * Var("rows") + I
    aux = Buffer("bias", ("heads", "seqlen"), F32, Space.GLOBAL)
    inside = row < Var("seqlen")
    value = select(inside, load("x_tile", J, I) + Load("bias", (head, row)) * (batch + 1), Const(0.0))
    body = (Copy("x_tile", here("x")), Map("t", value), Copy(here("y"), "t"))
    bias = np.arange(12, dtype=np.float32).reshape(2, 6)
    x, y = run_hand_made(hand_made(body, buffers=(aux,)), bias=bias)
    block = np.zeros((3, 2, 8, 4), np.float32)
    block[:, :, :6] = x
    turned = np.concatenate([block[:, :, :4].swapaxes(2, 3), block[:, :, 4:].swapaxes(2, 3)], axis=2)[:, :, :6]
    expected = turned + bias[None, :, :, None] * (np.arange(3) + 1).reshape(3, 1, 1, 1)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_reading_what_was_never_written_is_an_error():
    with pytest.raises(Hazard, match=r"t .* before anything was written"):
        run_hand_made(hand_made((Copy(here("y"), "t"),)))


def test_stages_are_separate():
    body = (Copy(Tile("x_tile", Const(1)), here("x")), Copy(here("y"), Tile("x_tile", Const(0))))
    with pytest.raises(Hazard, match="stage 0"):
        run_hand_made(hand_made(body))


def test_plain_copies_do_not_share_memory():
    body = (
        Copy("t", here("x")),
        Map("u", load("t", I, J)),
        Map("t", load("t", I, J) * Const(2.0)),
        Copy(here("y"), "u"),
    )
    kernel = hand_made(body, buffers=(Buffer("u", ("rows", "width"), F32, Space.REGISTER),))
    x, y = run_hand_made(kernel)
    np.testing.assert_array_equal(x, y)
