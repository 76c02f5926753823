"""Dense attention in torch with sinks and dropout, differentiable: an oracle beside `support.dense`, and its rule."""

import math

import support
import torch

NAMES = ("dq", "dk", "dv")


def dense(q, k, v, sinks=None, *, causal=False, mask=None, score=None, aux=None, keep=None, p=0.0, dtype=torch.float64):
    """(o, lse) of BSHD tensors by the formulas, every matrix stored in `dtype`, sums in float32 at least.

    keep, p: what dropout keeps, (batch, heads, seqlen_q, seqlen_k), and the part that it drops.
    """
    wide = torch.promote_types(dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = ((q / math.sqrt(q.shape[-1])) @ k.mT).to(wide)
    names = support._names(s) | (aux or {})
    if score is not None:
        s = support.value(score.expr, names | {"score": s}) + 0.0 * s
    shown = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    if causal:
        shown = shown.tril(s.shape[-1] - s.shape[-2])
    if mask is not None:
        shown = shown & torch.as_tensor(support.value(mask.expr, names), device=s.device)
    s = s.masked_fill(~shown, -math.inf)
    heads = s.shape[1]
    column = s.new_full((heads,), -math.inf) if sinks is None else sinks.to(wide)
    s = torch.cat([s, column[None, :, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    weights = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., :-1]
    if keep is not None:
        weights = weights * keep / (1.0 - p)
    return (weights.to(dtype) @ v).transpose(1, 2), lse


def evaluate(attend, arrays, do, dlse, dtype=None):
    """(o, lse) of attend(*arrays), and the gradients of the arrays, all of them cast to `dtype` where it is given."""
    leaves = [(x if dtype is None else x.to(dtype)).detach().requires_grad_() for x in arrays]
    o, lse = attend(*leaves)
    found = torch.autograd.grad([o, lse], leaves, [do.to(o.dtype), dlse.to(lse.dtype)])
    return o.detach(), lse.detach(), found


def failures(attend, q, k, v, do, sinks, **options):
    """Sentences on what `attend(q, k, v, sinks) -> (o, lse)` gets wrong, with the gradients of all four."""
    generator = torch.Generator(q.device).manual_seed(1)
    dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], device=q.device, generator=generator)
    arrays = (q, k, v, sinks)
    support.poison(q, k, v, do)
    o, lse, gradients = evaluate(attend, arrays, do, dlse)
    ref, low = (
        evaluate(lambda *given, dtype=dtype: dense(*given, **options, dtype=dtype), arrays, do, dlse, dtype)
        for dtype in (torch.float64, q.dtype)
    )
    found = [support.lse_violation(lse, ref[1]), support.violation("o", o, ref[0], low[0], 2.0, q.dtype)]
    for name, x, exact, rough in zip(NAMES, gradients, ref[2], low[2], strict=False):
        found.append(support.violation(name, x, exact, rough, 3.0, q.dtype))
    found.append(_dsinks_violation(gradients[3], ref, do, sinks, options.get("p", 0.0)))
    return [sentence for sentence in found if sentence]


def _dsinks_violation(x, ref, do, sinks, p):
    """A sentence where dsinks is further off than what O, rounded to the storage type, makes of a sum over rows.

    An error of one unit in each element of O, v being about 1 and 1 / (1 - p) with dropout, adds up as a random walk;
    two of these are allowed.
    """
    if x.dtype != sinks.dtype:
        return f"dsinks is {x.dtype}"
    unit, own = torch.finfo(do.dtype).eps, torch.finfo(x.dtype).eps
    share = torch.exp(sinks.double()[:, None] - ref[1]).nan_to_num(0.0)
    walk = (share.square() * do.double().square().sum(-1).transpose(1, 2)).sum((0, 2)).sqrt()
    error, bound = (x.double() - ref[2][3]).abs(), 2 * unit * walk / (1.0 - p) + own * ref[2][3].abs() + 1e-5
    if bool((error <= bound).all()):  # written so that a NaN is a failure
        return None
    return f"dsinks: errors {error.tolist()} exceed {bound.tolist()}"
