"""Plans of head dims over 256, and of values that are columns of the keys."""

from dataclasses import replace
from itertools import product

import pytest
from test_plan_soundness import SMALLEST, problems

from flashgen import build
from flashgen.attention.forward import forward
from flashgen.ir import verify
from flashgen.ir.nodes import Gemm
from flashgen.ir.visit import rewrite_kernel, statements
from flashgen.machine.sm90 import FIRST_COLUMNS, OWN_COLUMNS, Describe, TmaStore
from flashgen.plan import cost, planner, wide
from flashgen.plan.arch import parse_arch
from flashgen.spec import Spec

HOPPER = parse_arch("sm_90a")
WIDTHS = (8, 64, 128, 256, 264, 320, 384, 512)
PAIRS = [dims for dims in product((*WIDTHS, 576), WIDTHS) if max(dims) > 256]


@pytest.mark.parametrize("arch", [SMALLEST, HOPPER], ids=lambda arch: arch.name)
@pytest.mark.parametrize("dims", PAIRS, ids=str)
def test_every_wide_head_has_a_sound_plan(dims, arch):
    for shared in (False, True)[: 2 if dims[1] <= dims[0] else 1]:
        spec = Spec(*dims, causal=True, shared_kv=shared)
        plan = planner.plan(forward(spec), spec, arch)
        assert plan.arch == arch and (plan.sizes["head_dim"], plan.sizes["head_dim_v"]) >= dims
        if arch.family == "sm80":
            assert list(problems(forward(spec), plan)) == []
        assert (plan.copies("s") > 1) is (plan.layouts["o_acc"][1] > 1)
        assert plan.copies("o_acc") == 1 and plan.shared_bytes <= arch.shared_per_block


def test_explain_says_how_o_is_divided_and_what_that_costs():
    for shared in (False, True):
        spec = Spec(576, 512, shared_kv=shared)
        text = planner.plan(forward(spec), spec, HOPPER).explain()
        assert "output 4 x 2 among the warps" in text and "both warpgroups computing the scores" in text
        assert "KiB of shared memory exceed the 227 KiB of a block" in text
    assert "output" not in planner.plan(forward(Spec(256, 256)), Spec(256, 256), HOPPER).explain()


@pytest.mark.parametrize(("head_dim_v", "sm80", "sm90"), [(264, 320, 384), (384, 384, 384), (392, 448, 512)])
def test_values_are_padded_to_whole_parts(head_dim_v, sm80, sm90):
    spec = Spec(512, head_dim_v)
    assert planner.head_dims(spec, SMALLEST)["head_dim_v"] == sm80
    assert planner.head_dims(spec, HOPPER)["head_dim_v"] == sm90


def test_keys_are_as_wide_as_the_values_in_them():
    spec = Spec(272, 264, shared_kv=True)
    assert planner.head_dims(spec, HOPPER) == {"head_dim": 384, "head_dim_v": 384}


def test_what_copies_compute_is_counted():
    kernel = forward(Spec(512, 512))
    sizes = {"block_q": 64, "block_kv": 32, "head_dim": 512, "head_dim_v": 512}
    arch = parse_arch("sm_80")
    divided = dict(wide.output_layouts(("s", "p", "p_operand", "o_acc", "o_out"), 4, 2))
    alone = dict.fromkeys(divided, (4, 1))
    twice, once = cost.step(kernel, arch, sizes, divided, 8), cost.step(kernel, arch, sizes, alone, 4)
    assert twice.flops == once.flops and twice.matrix == 1.5 * once.matrix and twice.special > once.special
    fewer, more = (cost.accumulator_registers(kernel, sizes, n, x) for n, x in ((256, divided), (128, alone)))
    assert fewer < more


def test_a_product_names_the_columns_that_it_reads():
    kernel = forward(Spec(64, 32, shared_kv=True))
    verify.tile(kernel)
    whole = rewrite_kernel(kernel, lambda stmt: replace(stmt, columns="") if isinstance(stmt, Gemm) else stmt)
    with pytest.raises(verify.VerifyError, match="disagreeing shapes"):
        verify.tile(whole)
    assert (
        "gemm p_operand, k_tile[:, :head_dim_v]  # values are the first columns"
        in build.forward(Spec(64, 32, shared_kv=True), SMALLEST)[0].tile_text
    )


@pytest.mark.parametrize(("dims", "part"), [((576, 512), OWN_COLUMNS), ((576, 128), FIRST_COLUMNS)])
def test_the_two_products_of_a_tile_of_keys_have_descriptors_of_their_own(dims, part):
    machine = build.forward(Spec(*dims, shared_kv=True), HOPPER)[0].machine
    every = list(statements(machine.body))
    assert {stmt.part for stmt in every if isinstance(stmt, Describe) and stmt.tile.buffer == "k_tile"} == {"", part}
    across = {stmt.across for stmt in every if isinstance(stmt, TmaStore)}
    assert across == ({2} if part == OWN_COLUMNS else {None})


def test_specs_say_what_they_are():
    spec = Spec(576, 512, causal=True, shared_kv=True)
    assert str(spec) == "d576v512_bf16_causal_sharedkv" and not spec.differentiable
    assert Spec(256, 256).differentiable and not Spec(264, 8).differentiable and not Spec(8, 264).differentiable
    assert list(build.everything(Spec(8, 264), SMALLEST)) == ["attention_forward"]
    with pytest.raises(ValueError, match="head_dim_v = 264 has no backward"):
        build.backward(Spec(8, 264), SMALLEST)
