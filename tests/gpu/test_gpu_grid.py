"""The grid of the issue: dtype, head_dim, causal, heads, and inside each test all lengths; every failure is listed."""

import itertools

import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("torch")

import support  # noqa: E402
from cases import DTYPES, HEAD_DIMS, HEADS, LENGTHS, Spec, attend, inputs, report  # noqa: E402

GRID = [Spec(d, causal, dtype=dtype) for dtype, d, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True))]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("spec", GRID, ids=str)
def test_forward_and_backward(kernel, spec, heads):
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        long = max(seqlen_q, seqlen_k) > 1024
        arrays = inputs(spec, 1 if long else 2, seqlen_q, seqlen_k, *HEADS[heads][long], seed=seed)
        sentences = support.failures(attend(kernel), *arrays, causal=spec.causal)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


def test_poison_reaches_what_is_allocated_next():
    """The suite's own assumption: memory that a kernel is given is NaN until it writes there."""
    import torch

    q = torch.zeros(2, 1024, 3, 64, device="cuda", dtype=torch.bfloat16)
    support.poison(q)
    fresh = [
        torch.empty_like(q),
        torch.empty_like(q, dtype=torch.float32),
        q.new_empty(2, 3, 1024, dtype=torch.float32),
    ]
    assert all(bool(torch.isnan(x).all()) for x in fresh)
