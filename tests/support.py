"""Torch helpers for the tests: dense attention by formula, the correctness rule, and poisoned memory.

The rule, with `ref` the result in float64 and `low` the same formula computed densely in the storage dtype:

    max|x - ref| <= factor * max|low - ref| + 2 * max|(ref + 0.3 - 0.3) - ref|     (the last term in the storage dtype)

factor is 2 for the output and 3 for gradients. So a kernel may be about as wrong as plain torch, and no more.
Everything here runs on the device of its arguments.
"""

import math
import operator
import sys
from typing import NamedTuple

import torch

from flashgen.ir.expr import Cast, Const, Load, Select, Unary, Var

FACTOR = {"o": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}
LSE_ATOL, LSE_RTOL = 5e-5, 1e-5  # fp32 sums of at most a few hundred products; rounding to bf16 anywhere shows as 1e-3
LARGEST_POISON = 1 << 30


class Result(NamedTuple):
    """What attention computes, BSHD; lse is (batch, heads_q, seqlen_q)."""

    o: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def dense(q, k, v, do, *, causal=False, scale=None, dlse=None, dtype=torch.float64, mask=None, score=None, aux=None):
    """Attention and its gradients by the formulas of flashgen/interp/reference.py, every matrix stored in `dtype`.

    Sums inside one softmax are taken in fp32 at least, as torch does; so are mask and score, traced functions, and the
    derivative of score is autograd's. aux: the arrays that they read, by their names there.
    """
    wide = torch.promote_types(dtype, torch.float32)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[2] // k.shape[2]
    qh, doh = (x.to(dtype).transpose(1, 2) for x in (q, do))
    kh, vh = (x.to(dtype).transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    s = (qh * scale) @ kh.mT
    names = _names(s) | (aux or {})
    slope = 1.0
    if score is not None:
        raw = s.to(wide).requires_grad_()
        with torch.enable_grad():
            scored = value(score.expr, names | {"score": raw}) + 0.0 * raw.detach()
            depends = scored.requires_grad
            slope = torch.autograd.grad(scored.sum(), raw)[0] if depends and raw.numel() else torch.zeros_like(raw)
        s = scored.detach().to(dtype)
    if mask is not None:
        s = s.masked_fill(~torch.as_tensor(value(mask.expr, names), device=s.device), -math.inf)
    p, lse = _softmax(s, causal)
    dp = (doh @ vh.mT).to(wide)
    ds = dp - (p.to(wide) * dp).sum(-1, keepdim=True)
    if dlse is not None:
        ds = ds + dlse.to(wide)[..., None]
    ds = torch.where(p > 0, p.to(wide) * ds * slope, 0.0).to(dtype)
    dk = _over_group(ds.mT @ (qh * scale), group)
    dv = _over_group(p.mT @ doh, group)
    o, dq, dk, dv = (x.transpose(1, 2) for x in (p @ vh, ds @ kh * scale, dk, dv))
    return Result(o, lse, dq, dk, dv)


def dense_in_chunks(q, k, v, do, *, rows=1024, dtype=torch.float64):
    """`dense`, causal and of as many queries as keys, for so many queries at a time: O(rows * seqlen) memory.

    A chunk sees the keys up to its own end: the mask is aligned there. dk and dv are sums over the chunks in float64.
    """
    pieces = []
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for start in range(0, q.shape[1], rows):
        here, seen = slice(start, start + rows), slice(0, start + rows)
        part = dense(q[:, here], k[:, seen], v[:, seen], do[:, here], causal=True, dtype=dtype)
        dk[:, seen] += part.dk
        dv[:, seen] += part.dv
        pieces.append((part.o, part.lse, part.dq))
    o, lse, dq = (torch.cat(x, axis) for x, axis in zip(zip(*pieces, strict=True), (1, 2, 1), strict=True))
    return Result(o, lse, dq, dk.to(dtype), dv.to(dtype))


def _names(s):
    """What mask and score functions are told of each element of the scores, by name."""
    sizes = dict(zip(("b", "h", "q_idx", "kv_idx"), s.shape, strict=True))
    places = {}
    for at, (name, size) in enumerate(sizes.items()):
        places[name] = torch.arange(size, device=s.device).reshape(-1, *(1,) * (3 - at))
    return places | {"heads": sizes["h"], "seqlen_q": sizes["q_idx"], "seqlen_k": sizes["kv_idx"]}


FUNCTIONS = {
    "abs": torch.abs,
    "exp2": torch.exp2,
    "log2": torch.log2,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "sin": torch.sin,
    "cos": torch.cos,
    "sqrt": torch.sqrt,
    "reciprocal": torch.reciprocal,
    "min": torch.minimum,
    "max": torch.maximum,
    "floor_div": torch.floor_divide,
    "floor_mod": torch.remainder,
}
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "&": operator.and_,
    "|": operator.or_,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def value(expr, names):
    """A traced expression in torch; floats have the type of the score, or float64 where there is none."""
    score = names.get("score")
    like = {"dtype": torch.float64 if score is None else score.dtype, "device": names["q_idx"].device}
    match expr:
        case Const(number):
            return torch.tensor(number, device=like["device"], dtype=like["dtype"] if type(number) is float else None)
        case Var(name):
            return torch.as_tensor(names[name], device=like["device"])
        case Load(array, index):
            places = zip((value(part, names) for part in index), names[array].shape, strict=True)
            found = names[array][tuple(torch.where((x >= 0) & (x < size), x, size - 1) for x, size in places)]
            return found.to(like["dtype"]) if found.is_floating_point() else found
        case Cast(_, x):
            return value(x, names).to(like["dtype"])
        case Select(condition, x, y):
            return torch.where(value(condition, names), value(x, names), value(y, names))
        case Unary(op, x):
            return FUNCTIONS[op](value(x, names))
    x, y = value(expr.x, names), value(expr.y, names)
    return (FUNCTIONS.get(expr.op) or OPERATIONS[expr.op])(x, y)


def _softmax(s, causal):
    """(p, lse) of the scores (batch, heads, seqlen_q, seqlen_k); a row without keys has p = 0 and lse = -inf."""
    seqlen_q, seqlen_k = s.shape[-2:]
    if causal:
        allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=s.device).tril(seqlen_k - seqlen_q)
        s = s.masked_fill(~allowed, -math.inf)
    if seqlen_k == 0:
        return s, s.new_full(s.shape[:-1], -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.softmax(s, dim=-1)
    return torch.where((lse == -math.inf)[..., None], 0.0, p), lse


def _over_group(x, group):
    """(batch, heads_q, s, d) -> (batch, heads_kv, s, d): the sum over the query heads of one key and value head."""
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)


def evaluate(attend, q, k, v, do, *, dlse=None):
    """Runs `attend(q, k, v) -> (o, lse)` and its backward in poisoned memory; strides of the arguments are kept."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    poison(q, k, v, do)
    o, lse = attend(*leaves)
    poison(q, k, v, do)
    outputs, gradients = ([o], [do]) if dlse is None else ([o, lse], [do, dlse])
    return Result(o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients))


def judge(result, q, k, v, do, *, low=None, **options):
    """Sentences on what is wrong with `result` by the correctness rule; an empty list when nothing is."""
    ref = dense(q, k, v, do, **options)
    low = low or dense(q, k, v, do, **options, dtype=q.dtype)
    return violations(result, ref, low, q.dtype)


def violations(result, ref, low, dtype):
    """Sentences on where the LSE of `result` is wrong, and where its other tensors break the rule."""
    found = [lse_violation(result.lse, ref.lse)]
    for name, factor in FACTOR.items():
        found.append(violation(name, getattr(result, name), getattr(ref, name), getattr(low, name), factor, dtype))
    return [sentence for sentence in found if sentence]


def failures(attend, q, k, v, do, *, dlse=None, **options):
    """evaluate and judge: sentences on what `attend(q, k, v) -> (o, lse)` gets wrong, on BSHD tensors."""
    result = evaluate(attend, q, k, v, do, dlse=dlse)
    return judge(result, q, k, v, do, dlse=dlse, **options)


def forward_failures(attend, q, k, v, **options):
    """`failures` of kernels that have no backward: of o and the LSE alone."""
    do = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    poison(q, k, v, do)
    with torch.no_grad():
        o, lse = attend(q, k, v)
    ref, low = dense(q, k, v, do, **options), dense(q, k, v, do, **options, dtype=q.dtype)
    found = [lse_violation(lse, ref.lse), violation("o", o, ref.o, low.o, FACTOR["o"], q.dtype)]
    return [sentence for sentence in found if sentence]


def violation(name, x, ref, low, factor, dtype):
    """A sentence where x breaks the rule, else None."""
    if x.shape != ref.shape or x.dtype != dtype:
        return f"{name}: {x.dtype} {tuple(x.shape)} instead of {dtype} {tuple(ref.shape)}"
    if x.numel() == 0:
        return None
    if not torch.isfinite(x).all():
        return f"{name}: {int((~torch.isfinite(x)).sum())} of {x.numel()} elements are not finite"
    error = (x.double() - ref).abs()
    bound = factor * float((low.double() - ref).abs().max()) + rounding(ref, dtype)
    worst = float(error.max())
    if worst <= bound:
        return None
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"{name}: error {worst:.3g} at {where} exceeds {bound:.3g}; {int((error > bound).sum())} of {x.numel()} do"


def rounding(ref, dtype):
    """2 * max|(ref + 0.3 - 0.3) - ref|, each sum rounded to dtype: what one more rounding near ref may cost.

    0.3 itself is fp32, as on CUDA; on the CPU torch would round it to bfloat16 first and leave nothing at ref = 0.
    """
    stored = ref.to(dtype)
    raised = (stored.float() + 0.3).to(dtype)
    lowered = (raised.float() - 0.3).to(dtype)
    return 2.0 * float((lowered - stored).abs().max())


def lse_violation(lse, ref):
    """A sentence where the fp32 LSE is wrong, else None; it is -inf exactly in the rows that see no key."""
    if lse.shape != ref.shape or lse.dtype != torch.float32:
        return f"lse: {lse.dtype} {tuple(lse.shape)} instead of torch.float32 {tuple(ref.shape)}"
    masked = ref == -math.inf
    if not torch.equal(lse == -math.inf, masked):
        return f"lse: -inf in {int((lse == -math.inf).sum())} rows instead of {int(masked.sum())}, or in other ones"
    error = torch.where(masked, 0.0, (lse.double() - ref).abs() - LSE_RTOL * ref.abs())
    if error.numel() == 0 or bool((error <= LSE_ATOL).all()):  # written so that a NaN is a failure
        return None
    return f"lse: error {float(error.nan_to_num(math.inf).max()):.3g} exceeds {LSE_ATOL:.3g}"


def poison(*like):
    """Leaves NaN in the freed blocks that the next allocations of outputs and workspaces get.

    Sizes are those of the arguments in their dtype and in fp32, of one fp32 number a row, and small powers of two.
    """
    if not like[0].is_cuda:
        return
    sizes = {x.numel() * x.element_size() * wider for x in like for wider in (1, 2)}
    sizes |= {4 * x.numel() // max(1, x.shape[-1]) for x in like} | {1 << n for n in range(9, 21, 2)}
    sizes = [size for size in sorted(sizes, reverse=True) if 0 < size <= LARGEST_POISON]
    blocks = [like[0].new_full((size,), 0xFF, dtype=torch.uint8) for size in sizes for _ in range(4)]
    if "cupy" in sys.modules:  # the runtime may take its workspaces from CuPy's pool
        blocks += [sys.modules["cupy"].full(size, 0xFF, dtype="uint8") for size in sizes]
    torch.cuda.synchronize()  # CuPy's pool may serve another stream
    del blocks


def random_inputs(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v=None, *, dtype, device, seed=0):
    """Normal (q, k, v, do), contiguous BSHD."""
    generator = torch.Generator(device).manual_seed(seed)
    head_dim_v = head_dim_v or head_dim
    shapes = [
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim_v),
        (batch, seqlen_q, heads_q, head_dim_v),
    ]
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
