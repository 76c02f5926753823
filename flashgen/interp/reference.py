"""Dense exact attention in NumPy float64, forward and backward: the oracle for numbers.

Every array is BSHD: q is (batch, seqlen_q, heads_q, head_dim), k is (batch, seqlen_k, heads_kv, head_dim),
v is (batch, seqlen_k, heads_kv, head_dim_v); the LSE is (batch, heads_q, seqlen_q). Query head h reads the
key and value head h // (heads_q // heads_kv). With s = scale * q k^T, masked entries at -inf:

    lse_i = log sum_j exp(s_ij)        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j

The backward is that of Dao, "FlashAttention-2" (arXiv:2307.08691), section 3.1.2, with one more term because
d lse_i / d s_ij = p_ij: the gradient of the LSE adds to dP - delta.

    dv_j = sum_i p_ij do_i     dp_ij = do_i . v_j     delta_i = sum_j p_ij dp_ij (= do_i . o_i)
    ds_ij = p_ij (dp_ij - delta_i + dlse_i)     dq_i = scale sum_j ds_ij k_j     dk_j = scale sum_i ds_ij q_i

With a score function f in between, s = f(scale * q k^T), and ds has its derivative as a factor.

A row in which every key is masked gives o = 0 and lse = -inf, and adds nothing to any gradient.
"""

import math
from collections.abc import Callable

import numpy as np

from flashgen.calculus import derivative, derivative_by_load, loads_of
from flashgen.interp.common import ARITHMETIC, add_elements, gather
from flashgen.ir.expr import COMPARE, Binary, Cast, Compare, Const, Load, Select, Unary, Var


def forward(q, k, v, *, causal=False, scale=None, mask=None, score=None, aux=None):
    """(o, lse): o (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), both float64.

    mask, score: traced functions, as a Spec has them. aux: the arrays that they read, by their names there.
    """
    _, _, v_heads, p, lse, _ = _probabilities(q, k, v, causal, scale, mask, score, aux)
    return _ungroup(p @ v_heads), _rows(lse)


def backward(q, k, v, do, dlse=None, *, causal=False, scale=None, mask=None, score=None, aux=None):
    """(dq, dk, dv) in float64, shaped as q, k and v.

    do is (batch, seqlen_q, heads_q, head_dim_v). dlse, the gradient of the LSE, is (batch, heads_q, seqlen_q) or
    None for zero; where a row is masked entirely its value is ignored, as that of do is.
    """
    q_heads, k_heads, v_heads, p, lse, slope = _probabilities(q, k, v, causal, scale, mask, score, aux)
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    ds, do_heads = _score_gradient(k, v_heads, p, lse, do, dlse)
    ds = ds * np.where(p > 0.0, slope, 0.0)
    dq = _ungroup(ds @ k_heads) * scale
    dk = _over_group(_swap(ds) @ q_heads) * scale
    dv = _over_group(_swap(p) @ do_heads)
    return dq, dk, dv


def backward_aux(q, k, v, do, dlse=None, *, array, score, causal=False, scale=None, mask=None, aux=None):
    """The gradient of an array that the score function reads, by its name in `aux`; float64, shaped as it is.

    With f the score function it is, of each element, the sum of p (dp - delta + dlse) df / d load over the elements of
    the scores that load it; an index out of range loads the last of its axis.
    """
    _, _, v_heads, p, lse, _ = _probabilities(q, k, v, causal, scale, mask, score, aux)
    ds, _ = _score_gradient(k, v_heads, p, lse, do, dlse)
    scores = _scaled_scores(q, k, scale)
    names = _names(scores) | {"score": scores} | aux
    found = np.zeros(aux[array].shape)
    for load in loads_of(score.expr, array):
        with np.errstate(all="ignore"):
            slope = _evaluate(derivative_by_load(score.expr, load), names)
            index = [_evaluate(part, names) for part in load.index]
        add_elements(found, index, np.where(p > 0.0, ds * slope, 0.0))
    return found


def _score_gradient(k, v_heads, p, lse, do, dlse):
    """ds of what the score function gives, and do by `_group`, zero where a row has no key."""
    attends = np.isfinite(lse)
    do_heads = np.where(attends, _group(do, k.shape[2]), 0.0)
    dp = do_heads @ _swap(v_heads)
    delta = np.sum(p * dp, axis=-1, keepdims=True)
    dlse_rows = 0.0 if dlse is None else np.where(attends, np.asarray(dlse, np.float64).reshape(lse.shape), 0.0)
    return p * (dp - delta + dlse_rows), do_heads


def causal_mask(seqlen_q, seqlen_k):
    """Boolean (seqlen_q, seqlen_k): query i sees key j where j <= i + seqlen_k - seqlen_q, aligned bottom-right.

    The last query sees every key; where seqlen_q > seqlen_k the first seqlen_q - seqlen_k queries see none.
    """
    return np.arange(seqlen_k)[None, :] <= np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)


def _probabilities(q, k, v, causal, scale, mask, score, aux):
    """q, k, v by `_group`, p (batch, heads_kv, group, seqlen_q, seqlen_k), lse (..., seqlen_q, 1), and the slope:
    the derivative of the score function, like p."""
    q_heads, k_heads, v_heads = (_group(x, k.shape[2]) for x in (q, k, v))
    s = _scaled_scores(q, k, scale)
    slope = 1.0
    names = _names(s) | {"score": s} | (aux or {})
    if score is not None:
        with np.errstate(all="ignore"):
            slope = _evaluate(derivative(score.expr, "score"), names)
            s = np.broadcast_to(_evaluate(score.expr, names), s.shape)
    if causal:
        s = np.where(causal_mask(q.shape[1], k.shape[1]), s, -np.inf)
    if mask is not None:
        s = np.where(_evaluate(mask.expr, names), s, -np.inf)
    row_max = np.max(s, axis=-1, keepdims=True, initial=-np.inf)
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)  # -inf - -inf would be NaN in a row of masked scores
    p = np.exp(s - row_max)
    row_sum = np.sum(p, axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(row_sum)
    return q_heads, k_heads, v_heads, p / np.where(row_sum > 0.0, row_sum, 1.0), lse, slope


def _scaled_scores(q, k, scale):
    """scale * q k^T, (batch, heads_kv, group, seqlen_q, seqlen_k)."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    return (_group(q, k.shape[2]) @ _swap(_group(k, k.shape[2]))) * scale


def _names(s):
    """What mask and score functions are told of each element of the scores, by name."""
    batch, heads_kv, group, seqlen_q, seqlen_k = s.shape
    return {
        "b": np.arange(batch).reshape(-1, 1, 1, 1, 1),
        "h": np.arange(heads_kv * group).reshape(1, heads_kv, group, 1, 1),
        "q_idx": np.arange(seqlen_q)[:, None],
        "kv_idx": np.arange(seqlen_k),
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads": heads_kv * group,
    }


_FUNCTIONS: dict[str, Callable] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp2": np.exp2,
    "log2": np.log2,
    "tanh": np.tanh,
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1.0 / x,
}


def _evaluate(expr, names):
    """The value of a traced expression, in float64."""
    match expr:
        case Const(value):
            return value
        case Var(name):
            return names[name]
        case Load(array, index):
            found = gather(names[array], [_evaluate(part, names) for part in index])
            return found if found.dtype.kind == "i" else np.asarray(found, np.float64)
        case Cast(_, x):
            return np.asarray(_evaluate(x, names), np.float64)
        case Unary(op, x):
            return _FUNCTIONS[op](_evaluate(x, names))
        case Compare(op, x, y):
            return COMPARE[op](_evaluate(x, names), _evaluate(y, names))
        case Binary(op, x, y):
            return ARITHMETIC[op](_evaluate(x, names), _evaluate(y, names))
        case Select(condition, x, y):
            return np.where(*(_evaluate(part, names) for part in (condition, x, y)))
    raise TypeError(f"{expr!r} is not part of a mask or score function")


def _group(x, heads_kv):
    """(batch, seqlen, heads, dim) -> float64 (batch, heads_kv, heads / heads_kv, seqlen, dim)."""
    batch, seqlen, heads, dim = x.shape
    grouped = np.asarray(x, np.float64).reshape(batch, seqlen, heads_kv, heads // heads_kv, dim)
    return grouped.transpose(0, 2, 3, 1, 4)


def _ungroup(x):
    """(batch, heads_kv, group, seqlen, dim) -> (batch, seqlen, heads_kv * group, dim)."""
    batch, heads_kv, group, seqlen, dim = x.shape
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2, 4)).reshape(batch, seqlen, heads_kv * group, dim)


def _over_group(x):
    """(batch, heads_kv, group, seqlen, dim) -> (batch, seqlen, heads_kv, dim), summed over the group of query heads."""
    return np.ascontiguousarray(x.sum(axis=2).transpose(0, 2, 1, 3))


def _rows(lse):
    """(batch, heads_kv, group, seqlen_q, 1) -> (batch, heads_q, seqlen_q)."""
    batch, heads_kv, group, seqlen, _ = lse.shape
    return lse.reshape(batch, heads_kv * group, seqlen)


def _swap(x):
    """The transpose of each matrix of a stack."""
    return np.swapaxes(x, -1, -2)
