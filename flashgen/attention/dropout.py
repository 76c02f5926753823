"""Dropout: each probability is kept with 1 - p, and the kept ones are divided by that.

    O = (keep * P / (1 - p)) V     dV = (keep * P / (1 - p))^T dO     dP = keep / (1 - p) * (dO V^T)
P is the softmax as without it, and so is the LSE; delta = rowsum(dO * O) stays sum_j P dP. Whether an element is kept
follows from the seed, the offset, and the element's own place (`Random` in ir/expr.py), so that every kernel and every
tile has the same answer, and the backward stores nothing. Of packed sequences the place is within the sequence, whose
number is that of the batch.

The division comes last: `inverse` of a row in the forward, dv and dP in the backward. There the sign of P, which has
none of its own, tells what is dropped, so that one random number is enough for dV and dS.
"""

from __future__ import annotations

from flashgen.attention import parts
from flashgen.attention.parts import BATCH, HEADS
from flashgen.ir.dtype import F32, I32
from flashgen.ir.expr import Expr, I, J, Random, Unary, Var, load, select
from flashgen.ir.nodes import Map, Scalar, Stmt
from flashgen.spec import Spec

SCALARS = (
    Scalar("dropout_seed_low", I32),
    Scalar("dropout_seed_high", I32),
    Scalar("dropout_offset", I32),
    Scalar("keep_below", I32),
    Scalar("keep_scale", F32),
)
KEEP_SCALE = Var("keep_scale")
P, DP = load("p", I, J), load("dp", I, J)
WIDE = 128


def values(p: float, seed: int, offset: int) -> dict[str, int | float]:
    """The values of SCALARS. seed: 64 bits, offset: 32; integers of a kernel have 32 and a sign."""
    low, high = seed & 0xFFFFFFFF, seed >> 32
    words = [word - (word >> 31 << 32) for word in (low, high, offset)]
    below = min(round((1.0 - p) * 2.0**32), 2**32 - 1) - 2**31
    return dict(zip((item.name for item in SCALARS), (*words, below, 1.0 / (1.0 - p)), strict=True))


def scalars(spec: Spec) -> tuple[Scalar, ...]:
    """What the kernels take beside, where the spec drops."""
    return SCALARS if spec.dropout else ()


def _kept(spec: Spec, transposed: bool = False) -> Expr:
    """True for the elements (i, j) of a tile of scores that are kept."""
    place = parts.arguments_of(spec, transposed)
    seed = (Var("dropout_seed_low"), Var("dropout_seed_high"), Var("dropout_offset"))
    return Random(*seed, BATCH * HEADS + place["h"], place["q_idx"], place["kv_idx"]) < Var("keep_below")


def dropped(spec: Spec) -> tuple[Stmt, ...]:
    """Of the forward: P without what is dropped, behind the sum that counts it."""
    return (Map("p", select(_kept(spec), P, 0.0), note="dropout"),) if spec.dropout else ()


def scaled(spec: Spec) -> tuple[Stmt, ...]:
    """Of the forward: the division by what is kept."""
    return (Map("inverse", load("inverse", I) * KEEP_SCALE, note="for what is dropped"),) if spec.dropout else ()


def marked(spec: Spec) -> tuple[Stmt, ...]:
    """Of dK and dV: -P for what is dropped."""
    return (Map("p", select(_kept(spec, transposed=True), P, -P), note="dropout: a sign"),) if spec.dropout else ()


def without_dropped(spec: Spec) -> Expr:
    """P for its product with dO, where it may be marked. Written so that NaN is kept."""
    return select(P < 0.0, 0.0, P) if spec.dropout else P


def before_weights(spec: Spec, weighted: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Where the slope of a score function, which has a sign, goes into P: dP is dropped by then, and P has none.

    Of a wide head P and dP may be computed by different warps: there random numbers tell once more what is kept.
    """
    if not (spec.dropout and weighted):
        return ()
    wide = max(spec.head_dim, spec.head_dim_v) > WIDE
    drop = gradient_dropped(spec, transposed=True) if wide else (Map("dp", select(P < 0.0, 0.0, DP * KEEP_SCALE)),)
    return (*drop, Map("p", Unary("abs", P)))


def gradient(spec: Spec, delta: Expr, weighted: tuple[Stmt, ...]) -> Expr:
    """dS = P (dP - delta), where P is still marked unless it has weights."""
    if not spec.dropout or weighted:
        return P * (DP - delta)
    return select(P < 0.0, P * delta, P * (DP * KEEP_SCALE - delta))


def gradient_dropped(spec: Spec, transposed: bool = False) -> tuple[Stmt, ...]:
    """dP for what is kept, where no sign of P tells it: of dQ alone, which P itself has no part in."""
    kept = _kept(spec, transposed)
    return (Map("dp", select(kept, DP * KEEP_SCALE, 0.0), note="dropout"),) if spec.dropout else ()
