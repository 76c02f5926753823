"""Calculus on expressions: intervals of masks, and derivatives of scores."""

from flashgen.calculus.derivatives import derivative, tame
from flashgen.calculus.intervals import (
    Ranges,
    Term,
    affine,
    extreme,
    grows,
    limits,
    loop_limits,
    orders,
    somewhere_hidden,
    unguarded,
)

__all__ = [
    "Ranges",
    "Term",
    "affine",
    "derivative",
    "extreme",
    "grows",
    "limits",
    "loop_limits",
    "orders",
    "somewhere_hidden",
    "tame",
    "unguarded",
]
