"""What the planner counts for operands of float32."""

import pytest

from flashgen import build
from flashgen.attention import backward, forward
from flashgen.ir.dtype import BF16, FP32, TF32
from flashgen.plan import cost, planner
from flashgen.plan.arch import parse_arch
from flashgen.plan.candidates import candidates
from flashgen.spec import Spec

SM_80 = parse_arch("sm_80")


def first(nest, spec):
    """A kernel, its sizes with the first candidate's blocks, the layouts and the warps."""
    kernel, sizes = nest(spec), planner.head_dims(spec, SM_80)
    candidate = next(iter(candidates(kernel, SM_80, sizes)))
    return kernel, sizes | dict(candidate.blocks), dict(candidate.layouts), candidate.warps


@pytest.mark.parametrize("nest", [forward.forward, backward.backward])
def test_a_product_takes_two_or_six_times_as_long(nest):
    """TF32 has half the rate of 16 bits, and FP32 three products of it; bytes from shared memory are twice as many."""
    steps = {dtype: cost.step(*reordered(nest, dtype)) for dtype in (BF16, TF32, FP32)}
    half, one, three = steps.values()
    assert half.flops == one.flops == three.flops
    assert (one.matrix, three.matrix) == (2 * half.matrix, 6 * half.matrix)
    assert one.shared == three.shared > 1.5 * half.shared


def reordered(nest, dtype):
    kernel, sizes, layouts, warps = first(nest, Spec(64, 64, dtype))
    return kernel, SM_80, sizes, layouts, warps


def test_parts_of_an_operand_take_registers():
    """Of P, 16 rows by 16 keys a warp: 8 numbers a thread, of which one part lies where P lay."""
    kernels = {dtype: first(forward.forward, Spec(64, 64, dtype)) for dtype in (BF16, TF32, FP32)}
    extra = {dtype: cost.split_registers(*found[:3]) for dtype, found in kernels.items()}
    assert extra == {BF16: 0, TF32: cost.SPLIT_REGISTERS, FP32: cost.SPLIT_REGISTERS + 8}
    drawing = first(forward.forward, Spec(64, 64, FP32, dropout=True))
    assert cost.split_registers(*drawing[:3]) == extra[FP32] + 2 * cost.RANDOM_REGISTERS


@pytest.mark.parametrize("head_dim", range(8, 225, 8))  # of wider ones estimates exceed the limit by one
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_every_head_dim_has_a_tile(arch, head_dim):
    """Within the registers, but for the backward that makes dQ too: then that has a kernel of its own."""
    for spec in (Spec(head_dim, head_dim, FP32), Spec(head_dim, head_dim, FP32, deterministic=True)):
        for stages in build.everything(spec, parse_arch(arch)).values():
            assert "may spill" not in stages.plan.source
            assert stages.plan.shared_bytes <= stages.plan.arch.shared_per_block
