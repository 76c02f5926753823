"""The Hopper family, asked for by arch="sm_90a": the grid, equal repeats, and strides that TMA cannot take."""

import itertools
import logging

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import DTYPES, HEAD_DIMS, HEADS, LENGTHS, Spec, attend, inputs, report  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCH = "sm_90a"
GRID = [
    Spec(d, causal, dtype=dtype, arch=ARCH) for dtype, d, causal in itertools.product(DTYPES, HEAD_DIMS, (False, True))
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("spec", GRID, ids=str)
def test_forward_and_backward(kernel, spec, heads):
    assert kernel.plan["attention_forward"].arch.name == ARCH
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        long = max(seqlen_q, seqlen_k) > 1024
        arrays = inputs(spec, 1 if long else 2, seqlen_q, seqlen_k, *HEADS[heads][long], seed=seed)
        sentences = support.failures(attend(kernel), *arrays, causal=spec.causal)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


@pytest.mark.parametrize("lengths", [(4224, 4224), (2000, 4000)])
@pytest.mark.parametrize("spec", [Spec(d, True, arch=ARCH) for d in (64, 128, 256)], ids=str)
def test_forward_repeats_bit_for_bit(kernel, spec, lengths):
    q, k, v, _ = inputs(spec, 1, *lengths, 4, 2)
    with torch.no_grad():
        first = kernel(q, k, v, return_lse=True)
        for _ in range(1000):
            again = kernel(q, k, v, return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("spec", [Spec(64, False, 40, arch=ARCH), Spec(192, True, 128, arch=ARCH)], ids=str)
def test_value_head_dims_apart(kernel, spec):
    arrays = inputs(spec, 2, 300, 500, 4, 2)
    report(support.failures(attend(kernel), *arrays, causal=spec.causal))


@pytest.mark.parametrize("spec", [Spec(64, True, layout="bhsd", arch=ARCH)], ids=str)
def test_the_other_layout(kernel, spec):
    q, k, v, _ = inputs(spec, 2, 300, 500, 4, 2)
    o = kernel(*(x.transpose(1, 2) for x in (q, k, v)))
    import flashgen

    assert torch.equal(o.transpose(1, 2), flashgen.compile(64, True, arch=ARCH)(q, k, v))


@pytest.mark.parametrize("spec", [Spec(64, arch=ARCH)], ids=str)
def test_strides_that_tma_cannot_take_run_on_the_portable_family(kernel, spec, caplog):
    q, k, v, do = inputs(spec, 2, 300, 500, 4, 4)
    k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    with caplog.at_level(logging.INFO, "flashgen"):
        report(support.failures(attend(kernel), q, k, v, do, causal=False))
    assert "sm_90 kernels run" in caplog.text
