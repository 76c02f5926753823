"""Attention sinks on the GPU, forward and backward, on both families, against dense float64 attention by autograd."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import denominators  # noqa: E402
import support  # noqa: E402
from cases import report  # noqa: E402
from functions import MASKS, SCORES  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = ((113, 203), (512, 256), (1, 300), (700, 1100))  # ragged, rows that see no key, many tiles
DRAWS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0), "softcap": 5.0},
    "first keys": {"mask_mod": masks.sink_window(100, 0), "score_mod": scores.alibi},
    "by head": {"mask_mod": MASKS["by head"], "score_mod": SCORES["wave"]},
    "nothing": {"mask_mod": MASKS["nothing"]},
}


def fails(kernel, head_dim, lengths, heads=(4, 2), dtype=torch.bfloat16, sinks=torch.float32):
    """Sentences on what the kernel gets wrong at some lengths; sinks among the scores, above and below them."""
    found = []
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        arrays = support.random_inputs(2, seqlen_q, seqlen_k, *heads, head_dim, dtype=dtype, device="cuda", seed=seed)
        t = torch.linspace(-3.0, 8.0, heads[0], device="cuda").to(sinks)

        def attend(q, k, v, t):
            return kernel(q, k, v, sinks=t, return_lse=True)

        found += [f"({seqlen_q}, {seqlen_k}) {x}" for x in denominators.failures(attend, *arrays, t, **functions)]
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", DRAWS)
def test_forward_and_backward(draw, arch):
    report(fails(flashgen.compile(128, **{"causal": False} | DRAWS[draw], arch=arch, sinks=True), 128, LENGTHS))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [40, 64, 256])
def test_other_head_dims_and_sinks_of_the_storage_type(head_dim, arch):
    kernel = flashgen.compile(head_dim, dtype="float16", arch=arch, sinks=True)
    report(fails(kernel, head_dim, LENGTHS[:3], dtype=torch.float16, sinks=torch.float16))


def test_every_row_of_packed_heads_has_its_own_sink():
    report(fails(flashgen.compile(128, sinks=True), 128, ((1, 700), (17, 300)), (16, 2)))


@pytest.mark.parametrize("arch", ARCHES)
def test_sinks_far_from_the_scores(arch):
    """None at all leaves what there is without; far above, they take everything; the rest has finite gradients."""
    q, k, v, do = support.random_inputs(1, 300, 400, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    kernel, plain = (flashgen.compile(128, arch=arch, sinks=sinks) for sinks in (True, False))
    t = torch.tensor([-torch.inf, 1e4, -1e4, 300.0], device="cuda")
    o, lse = kernel.forward(q, k, v, sinks=t)
    expected = plain.forward(q, k, v)
    for head in (0, 2):
        assert torch.equal(o[:, :, head], expected[0][:, :, head]) and torch.equal(lse[:, head], expected[1][:, head])
    assert torch.equal(lse[:, 1], torch.full_like(lse[:, 1], 1e4)) and not o[:, :, (1, 3)].any()
    gradients = kernel.backward(q, k, v, o, lse, do, sinks=t)
    assert all(torch.isfinite(x).all() for x in gradients)
    assert torch.equal(gradients[3], torch.zeros(4, device="cuda"))


def test_dsinks_repeat_bit_for_bit():
    q, k, v, do = support.random_inputs(3, 4224, 1000, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    kernel, t = flashgen.compile(64, sinks=True), torch.randn(8, device="cuda")
    o, lse = kernel.forward(q, k, v, sinks=t)
    first = kernel.backward(q, k, v, o, lse, do, sinks=t)[3]
    for _ in range(200):
        assert torch.equal(kernel.backward(q, k, v, o, lse, do, sinks=t)[3], first)


def test_more_batches_than_one_launch_has():
    q, k, v, do = support.random_inputs(70000, 3, 5, 2, 1, 16, dtype=torch.float16, device="cuda")
    kernel, t = flashgen.compile(16, dtype="float16", sinks=True), torch.tensor([0.5, -0.5], device="cuda")
    o, lse = kernel.forward(q, k, v, sinks=t)
    *found, whole = kernel.backward(q, k, v, o, lse, do, sinks=t)
    parts = [slice(0, 40000), slice(40000, 70000)]
    apart = [kernel.backward(*(x[part] for x in (q, k, v, o, lse, do)), sinks=t) for part in parts]
    torch.testing.assert_close(torch.cat([part[1] for part in apart]), found[1])
    torch.testing.assert_close(apart[0][3] + apart[1][3], whole, rtol=1e-4, atol=1e-2)
