"""Score functions that read arrays by [.., q_idx, kv_idx]."""

from flashgen import trace
from flashgen.ir.dtype import BF16


def of_both(score, b, h, q_idx, kv_idx, x):
    return score + x[b, h, q_idx, kv_idx]


def of_heads(score, b, h, q_idx, kv_idx, x):
    return 0.5 * x[h // 2, q_idx, kv_idx] + score


def of_none(score, b, h, q_idx, kv_idx, x):
    return score * x[q_idx, kv_idx]


def two(score, b, h, q_idx, kv_idx, x, y):
    return score - x[0, b, q_idx, kv_idx] + y[q_idx, kv_idx]


READING = {function.__name__: function for function in (of_both, of_heads, of_none, two)}
OUTER = {"of_both": [(2, 1)], "of_heads": [(1,)], "of_none": [()], "two": [(1, 2), ()]}  # axes of each array


def score(name, dtype=BF16):
    """The traced function, of arrays of one type."""
    return trace.score(READING[name], (dtype,) * len(OUTER[name]))
