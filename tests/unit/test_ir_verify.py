"""The verifier: the kernels of attention are well formed, and each rule is enforced."""

import pytest
from ir_kernels import NESTS, kernel_of, matrix, named, row

from flashgen.ir import verify
from flashgen.ir.dtype import BF16
from flashgen.ir.expr import Cast, Const, I, J, Var, load
from flashgen.ir.nodes import Copy, Fill, For, Gemm, If, Let, Map, RowReduce
from flashgen.machine.base import Barrier
from flashgen.machine.sm80 import WaitGroup


@pytest.mark.parametrize("nest", NESTS, **named)
def test_the_nests_are_well_formed(nest):
    verify.tile(nest)


READY = (Fill("x", Const(0.0)), Fill("v", Const(0.0)), Copy("t", row(Const(0))))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((Map("x", load("y", I, J)),), "y is read before it is written"),
        ((Gemm("x", "t", "t", accumulate=True),), "t is read before it is written"),
        ((*READY, Gemm("sq", "t", "t")), "disagreeing shapes"),
        ((*READY, Gemm("x", "t", "t", transpose_b=True)), "disagreeing shapes"),
        ((*READY, Gemm("sq", "t", "t", transpose_b=True, accumulate=True)), "sq is read before it is written"),
        ((Copy("t", row(Var("start"))),), "start is used before it is bound"),
        ((Copy("t", row(Var("start"))), Let("start", Const(0))), "start is used before it is bound"),
        ((If(Const(True), (Let("a", Const(0)),)), Let("b", Var("a"))), "a is used before it is bound"),
        ((For("k", Const(0), Const(2), (Let("a", Var("k")),)), Let("b", Var("k"))), "k is used before it is bound"),
        ((For("k", Const(0), Var("k"), ()),), "k is used before it is bound"),
        ((Let("b", Var("heads")),), "heads is used before it is bound"),  # a global's dimension is no constant
        ((Fill("nowhere", Const(0.0)),), "nowhere is not declared"),
        ((Map("x", load("nowhere", I, J)),), "nowhere is not declared"),
        ((*READY, Map("h", load("x", I, J))), "h must be cast"),
        ((*READY, Map("y", Cast(BF16, load("x", I, J)))), "y must be cast"),
        ((Barrier(),), "Barrier is no TILE statement"),
        ((If(Const(True), (WaitGroup(0),)),), "WaitGroup is no TILE statement"),
    ],
)
def test_each_rule_is_enforced(body, reason):
    with pytest.raises(verify.VerifyError, match=reason):
        verify.tile(kernel_of(*body))


def test_what_the_rules_allow():
    body = (
        *READY,
        Let("start", Var("block") * Var("r")),
        For("k", Const(0), Var("rows"), (Copy("t", row(Var("start") + Var("k"))), Fill("y", Const(0.0)))),
        Gemm("sq", "t", "t", transpose_b=True),
        Map("h", Cast(BF16, load("y", I, J) * Var("scale"))),
        If(Var("start") < Var("rows"), (RowReduce("v", "max", "x"),)),
    )
    verify.tile(kernel_of(*body))


def test_a_buffer_declared_twice():
    with pytest.raises(verify.VerifyError, match="x is declared twice"):
        verify.tile(kernel_of(extra=(matrix("x", "r"),)))
