"""Packed sequences with sinks and dropout: the oracle of `denominators` for each, and its rule for all together."""

import denominators
import support
import torch


def dense(q, k, v, sinks, of_q, of_k, *, keep=None, used=None, dtype=torch.float64, **options):
    """(o, lse) of (total, heads, dim): `denominators.dense` of each sequence, which may have no row.

    of_q, of_k: offsets, lists. keep: of a padded batch. used: keys of each sequence that are used, None for all.
    """
    outputs, lses = [], []
    for number in range(len(of_q) - 1):
        rows = slice(of_q[number], of_q[number + 1])
        cols = slice(of_k[number], of_k[number + 1] if used is None else of_k[number] + used[number])
        one = (q[rows][None], k[cols][None], v[cols][None])
        own = None if keep is None else keep[number : number + 1, :, : one[0].shape[1], : one[1].shape[1]]
        o, lse = denominators.dense(*one, sinks, keep=own, dtype=dtype, **options)
        outputs.append(o[0])
        lses.append(lse[0])
    return torch.cat(outputs), torch.cat(lses, dim=1)


def failures(attend, arrays, sinks, of_q, of_k, **options):
    """Sentences on what `attend(q, k, v, sinks) -> (o, lse)` gets wrong, with the gradients of all four.

    arrays: q, k, v and the gradient of o. options: of `dense`.
    """
    q, k, v, do = arrays
    generator = torch.Generator(q.device).manual_seed(1)
    dlse = torch.randn(q.shape[1], q.shape[0], device=q.device, generator=generator)
    leaves = (q, k, v, sinks)
    support.poison(*arrays)
    o, lse, gradients = denominators.evaluate(attend, leaves, do, dlse)
    ref, low = (
        denominators.evaluate(
            lambda *x, dtype=dtype: dense(*x, of_q, of_k, **options, dtype=dtype), leaves, do, dlse, dtype
        )
        for dtype in (torch.float64, q.dtype)
    )
    found = [support.lse_violation(lse, ref[1]), support.violation("o", o, ref[0], low[0], 2.0, q.dtype)]
    for name, x, exact, rough in zip(denominators.NAMES, gradients, ref[2], low[2], strict=False):
        found.append(support.violation(name, x, exact, rough, 3.0, q.dtype))
    one = (ref[0][None], ref[1][None], ref[2])  # one batch of all rows: the rule adds up over them
    found.append(denominators._dsinks_violation(gradients[3], one, do[None], sinks, options.get("p", 0.0)))
    return [sentence for sentence in found if sentence]
