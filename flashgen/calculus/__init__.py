"""Calculus on expressions: intervals of masks, and derivatives of scores."""

from flashgen.calculus.derivatives import derivative, tame
from flashgen.calculus.intervals import (
    Term,
    affine,
    extreme,
    grows,
    loop_limits,
    orders,
    somewhere_hidden,
    unguarded,
)

__all__ = [
    "Term",
    "affine",
    "derivative",
    "extreme",
    "grows",
    "loop_limits",
    "orders",
    "somewhere_hidden",
    "tame",
    "unguarded",
]
