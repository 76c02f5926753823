"""The whole list of passes: each leaves a verified kernel, and what was not lowered is refused."""

from dataclasses import replace

import pytest
from staged_kernels import ALL, PIPELINED, SPEC, machine_of

from flashgen import build, lower
from flashgen.attention import parts
from flashgen.ir import verify
from flashgen.ir.expr import Const
from flashgen.ir.nodes import Accumulate, Level
from flashgen.ir.printer import kernel_text
from flashgen.machine.verify import machine as verify_machine
from flashgen.plan.arch import parse_arch


@pytest.mark.parametrize("stages", ALL.values(), ids=ALL)
def test_each_pass_leaves_a_verified_kernel_and_a_sentence(stages):
    names = []
    result = lower.run(stages.tile, stages.plan, lambda name, kernel: names.append((name, kernel)))
    steps = (*lower.TILE_PASSES, *lower.SM80_PASSES)
    assert [name for name, _ in names] == [step.__name__ for step in steps]
    assert result == names[-1][1] == stages.machine
    levels = [kernel.level for _, kernel in names]
    assert levels == sorted(levels, key=lambda level: level is Level.MACHINE)
    for step in steps:
        first, rest = step.__doc__.split("\n", 1)
        assert first.endswith(".") and "Invariant: " in rest, step.__name__


def test_passes_do_not_touch_their_input():
    nest, plan = PIPELINED["backward"], machine_of("backward", (1, 1))[1]
    before = kernel_text(nest)
    lower.run(nest, plan)
    assert kernel_text(nest) == before


def test_a_kernel_that_was_not_lowered_is_refused():
    stages = ALL["attention_forward"]
    with pytest.raises(verify.VerifyError, match="still at the TILE level"):
        verify_machine(stages.tile, stages.plan)
    with pytest.raises(verify.VerifyError, match="Accumulate was not selected"):
        stray = (*stages.machine.body, Accumulate(parts.rows_of("o", Const(0), Const(0)), "o_acc"))
        verify_machine(stages.machine.having(body=stray), stages.plan)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("s", {"warps": (1, 2)}, "rows of s are spread over several warps"),
        ("p_operand", {"warps": (1, 1)}, "operand p_operand is divided among the warps otherwise than o_acc"),
        ("o_acc", {"warps": (64, 1)}, "is no multiple of 16 x 8 for each of its warps"),
        ("v_tile", {"shape": ("block_kv", "head_dim")}, "has disagreeing shapes"),
    ],
)
def test_products_must_fit_their_instructions(name, change, reason):
    stages = ALL["attention_forward"]
    wrong = stages.machine.with_buffer(replace(stages.machine.buffer(name), **change))
    with pytest.raises(verify.VerifyError, match=reason):
        verify_machine(wrong, stages.plan)


def test_each_tile_pass_is_verified_and_the_machine_kernel_once(monkeypatch):
    """The docstring of `lower.run`: every kernel of TILE level that a pass leaves, and the last of all."""
    stages = build.forward(SPEC, parse_arch("sm_80"))[0]
    verified, shown = [], []
    monkeypatch.setattr(verify, "tile", verified.append)
    monkeypatch.setattr(lower, "verify_machine", lambda kernel, plan: verified.append(kernel))
    machine = lower.run(stages.tile, stages.plan, lambda name, kernel: shown.append(kernel))
    tiles = [kernel for kernel in shown if kernel.level is Level.TILE]
    assert len(tiles) >= len(lower.TILE_PASSES) and machine is shown[-1]
    assert [id(kernel) for kernel in verified] == [id(kernel) for kernel in (*tiles, machine)]
