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
from flashgen.calculus.loads import by_distance, derivative_by_load, loads_of
from flashgen.calculus.signs import without_signs

__all__ = [
    "Ranges",
    "Term",
    "affine",
    "by_distance",
    "derivative",
    "derivative_by_load",
    "extreme",
    "grows",
    "limits",
    "loads_of",
    "loop_limits",
    "orders",
    "somewhere_hidden",
    "tame",
    "unguarded",
    "without_signs",
]
