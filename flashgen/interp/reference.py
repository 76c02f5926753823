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

With sinks, a logit t for each head, the denominator has one term more, exp(t), and so has lse. Then

    dt = sum_i exp(t - lse_i) (dlse_i - delta_i)

Packed sequences, and batches of which only some keys are used, are a call of this for each of them, with its own rows:
`first_batch` says its number, and what dropout keeps of it is that part of `flashgen.dropout_mask`.

With dropout, o_i = sum_j r_ij p_ij v_j, where r_ij is 1 / (1 - dropout_p) for what is kept and 0 else. Then

    dv_j = sum_i r_ij p_ij do_i     dp_ij = r_ij do_i . v_j

A row in which every key is masked gives o = 0 and lse = -inf, and adds nothing to any gradient. With a sink its lse is
t, of which t has the gradient.
"""

import math
from collections.abc import Callable

import numpy as np

from flashgen.calculus import derivative, derivative_by_load, loads_of
from flashgen.interp.common import ARITHMETIC, add_elements, gather
from flashgen.ir.expr import COMPARE, Binary, Cast, Compare, Const, Load, Select, Unary, Var


def forward(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    mask=None,
    score=None,
    aux=None,
    first_batch=0,
    sinks=None,
    keep=None,
    dropout_p=0.0,
):
    """(o, lse): o (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), both float64.

    mask, score: traced functions, as a Spec has them. aux: the arrays that they read, by their names there.
    first_batch: the number b of the first batch to them. sinks: (heads_q,), the logits that take part in the
    denominators; None without.
    keep: bool (batch, heads_q, seqlen_q, seqlen_k), what dropout keeps, as `flashgen.dropout_mask` gives it; None for
    all.
    """
    _, _, v_heads, p, lse, _ = _probabilities(q, k, v, causal, scale, mask, score, aux, first_batch, sinks)
    return _ungroup((p * _factors(keep, dropout_p, p)) @ v_heads), _rows(lse)


def backward(
    q,
    k,
    v,
    do,
    dlse=None,
    *,
    causal=False,
    scale=None,
    mask=None,
    score=None,
    aux=None,
    first_batch=0,
    sinks=None,
    keep=None,
    dropout_p=0.0,
):
    """(dq, dk, dv) in float64, shaped as q, k and v; with sinks (dq, dk, dv, dsinks).

    do is (batch, seqlen_q, heads_q, head_dim_v). dlse, the gradient of the LSE, is (batch, heads_q, seqlen_q) or
    None for zero; where a row is masked entirely its value is ignored, as that of do is.
    """
    p_of = _probabilities(q, k, v, causal, scale, mask, score, aux, first_batch, sinks)
    q_heads, k_heads, v_heads, p, lse, slope = p_of
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    factors = _factors(keep, dropout_p, p)
    ds, do_heads, delta, dlse_rows = _score_gradient(k, v_heads, p, lse, do, dlse, factors)
    ds = ds * np.where(p > 0.0, slope, 0.0)
    dq = _ungroup(ds @ k_heads) * scale
    dk = _over_group(_swap(ds) @ q_heads) * scale
    dv = _over_group(_swap(p * factors) @ do_heads)
    if sinks is None:
        return dq, dk, dv
    with np.errstate(invalid="ignore"):  # of a sink of -inf, and no key
        share = np.exp(np.where(np.isfinite(lse), _of_heads(sinks, lse) - lse, -np.inf))
    return dq, dk, dv, np.sum(share * (dlse_rows - delta), axis=(0, 3, 4)).reshape(-1)


def backward_aux(
    q,
    k,
    v,
    do,
    dlse=None,
    *,
    array,
    score,
    causal=False,
    scale=None,
    mask=None,
    aux=None,
    first_batch=0,
    sinks=None,
    keep=None,
    dropout_p=0.0,
):
    """The gradient of an array that the score function reads, by its name in `aux`; float64, shaped as it is.

    With f the score function it is, of each element, the sum of p (dp - delta + dlse) df / d load over the elements of
    the scores that load it; an index out of range loads the last of its axis.
    """
    _, _, v_heads, p, lse, _ = _probabilities(q, k, v, causal, scale, mask, score, aux, first_batch, sinks)
    ds, *_ = _score_gradient(k, v_heads, p, lse, do, dlse, _factors(keep, dropout_p, p))
    scores = _scaled_scores(q, k, scale)
    names = _names(scores, first_batch) | {"score": scores} | aux
    found = np.zeros(aux[array].shape)
    for load in loads_of(score.expr, array):
        with np.errstate(all="ignore"):
            slope = _evaluate(derivative_by_load(score.expr, load), names)
            index = [_evaluate(part, names) for part in load.index]
        add_elements(found, index, np.where(p > 0.0, ds * slope, 0.0))
    return found


def _score_gradient(k, v_heads, p, lse, do, dlse, factors=1.0):
    """ds of what the score function gives, do by `_group`, zero where a row has no key, and delta and dlse by rows."""
    attends = np.isfinite(lse)
    do_heads = np.where(attends, _group(do, k.shape[2]), 0.0)
    dp = factors * (do_heads @ _swap(v_heads))
    delta = np.sum(p * dp, axis=-1, keepdims=True)
    dlse_rows = 0.0 if dlse is None else np.where(attends, np.asarray(dlse, np.float64).reshape(lse.shape), 0.0)
    return p * (dp - delta + dlse_rows), do_heads, delta, dlse_rows


def causal_mask(seqlen_q, seqlen_k):
    """Boolean (seqlen_q, seqlen_k): query i sees key j where j <= i + seqlen_k - seqlen_q, aligned bottom-right.

    The last query sees every key; where seqlen_q > seqlen_k the first seqlen_q - seqlen_k queries see none.
    """
    return np.arange(seqlen_k)[None, :] <= np.arange(seqlen_q)[:, None] + (seqlen_k - seqlen_q)


def _probabilities(q, k, v, causal, scale, mask, score, aux, first_batch, sinks=None):
    """q, k, v by `_group`, p (batch, heads_kv, group, seqlen_q, seqlen_k), lse (..., seqlen_q, 1), and the slope:
    the derivative of the score function, like p."""
    q_heads, k_heads, v_heads = (_group(x, k.shape[2]) for x in (q, k, v))
    s = _scaled_scores(q, k, scale)
    slope = 1.0
    names = _names(s, first_batch) | {"score": s} | (aux or {})
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
    p = p / np.where(row_sum > 0.0, row_sum, 1.0)
    if sinks is not None:
        without, lse = lse, np.logaddexp(lse, _of_heads(sinks, lse))
        with np.errstate(invalid="ignore"):
            p = p * np.exp(np.where(np.isfinite(without), without - lse, -np.inf))
    return q_heads, k_heads, v_heads, p, lse, slope


def _scaled_scores(q, k, scale):
    """scale * q k^T, (batch, heads_kv, group, seqlen_q, seqlen_k)."""
    scale = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    return (_group(q, k.shape[2]) @ _swap(_group(k, k.shape[2]))) * scale


def _factors(keep, dropout_p, p):
    """What dropout multiplies each probability by."""
    return 1.0 if keep is None else np.asarray(keep, np.float64).reshape(p.shape) / (1.0 - dropout_p)


def _of_heads(sinks, lse):
    """(heads_q,) -> (1, heads_kv, group, 1, 1), as it meets the LSE."""
    return np.asarray(sinks, np.float64).reshape(1, *lse.shape[1:3], 1, 1)


def _names(s, first_batch):
    """What mask and score functions are told of each element of the scores, by name."""
    batch, heads_kv, group, seqlen_q, seqlen_k = s.shape
    return {
        "b": first_batch + np.arange(batch).reshape(-1, 1, 1, 1, 1),
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
