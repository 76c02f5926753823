"""Dropout on the GPU, forward and backward, on both families, against dense float64 attention with the same mask."""

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
LENGTHS = ((113, 203), (512, 256), (1, 300), (500, 700))  # ragged, rows that see no key, many tiles
DRAWS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"mask_mod": masks.sink_window(100, 0), "score_mod": scores.alibi},
    "by head": {"mask_mod": MASKS["by head"], "score_mod": SCORES["wave"]},
    "nothing": {"mask_mod": MASKS["nothing"]},
}
GIVEN = {"dropout_p": 0.2, "dropout_seed": 2**63 + 99, "dropout_offset": 2**31 + 3}


def fails(kernel, head_dim, lengths, heads=(4, 2), dtype=torch.bfloat16, given=GIVEN):
    """Sentences on what the kernel gets wrong at some lengths, its sinks included."""
    found = []
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    p, seed, offset = given.values()
    for number, (seqlen_q, seqlen_k) in enumerate(lengths):
        sizes = (2, seqlen_q, seqlen_k, *heads, head_dim)
        arrays = support.random_inputs(*sizes, dtype=dtype, device="cuda", seed=number)
        sinks = torch.linspace(-3.0, 4.0, heads[0], device="cuda")
        keep = torch.from_numpy(flashgen.dropout_mask(seed, offset, p, 2, heads[0], seqlen_q, seqlen_k)).cuda()

        def attend(q, k, v, t):
            return kernel(q, k, v, sinks=t, return_lse=True, **given)

        sentences = denominators.failures(attend, *arrays, sinks, keep=keep, p=p, **functions)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", DRAWS)
def test_forward_and_backward(draw, arch):
    options = {"causal": False} | DRAWS[draw]
    report(fails(flashgen.compile(128, arch=arch, sinks=True, dropout=True, **options), 128, LENGTHS))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", ["causal", "softcap"])
@pytest.mark.parametrize("head_dim", [40, 64, 256])
def test_other_head_dims(head_dim, draw, arch):
    kernel = flashgen.compile(head_dim, dtype="float16", arch=arch, sinks=True, dropout=True, **DRAWS[draw])
    report(fails(kernel, head_dim, LENGTHS[:2], dtype=torch.float16))


@pytest.mark.parametrize("arch", ARCHES)
def test_deterministic(arch):
    kernel = flashgen.compile(128, arch=arch, sinks=True, dropout=True, deterministic=True)
    report(fails(kernel, 128, LENGTHS[:2], given=GIVEN | {"dropout_p": 0.9}))


@pytest.mark.parametrize("arch", ARCHES)
def test_the_mask_element_by_element(arch):
    """With equal scores and V = 1 in one column of each key, O shows what is kept: of 64 keys, one for each column."""
    q, k = (torch.zeros(3, length, 2, 64, device="cuda", dtype=torch.float16) for length in (200, 64))
    v = torch.eye(64, device="cuda", dtype=torch.float16)[None, :, None].expand(3, 64, 2, 64).contiguous()
    kernel = flashgen.compile(64, False, dtype="float16", arch=arch, dropout=True)
    for p, seed, offset in ((0.5, 0, 0), (0.1, 2**64 - 1, 2**32 - 1), (1e-3, 5, 7)):
        o = kernel(q, k, v, dropout_p=p, dropout_seed=seed, dropout_offset=offset)
        kept = torch.from_numpy(flashgen.dropout_mask(seed, offset, p, 3, 2, 200, 64)).cuda()
        assert torch.equal(o.transpose(1, 2) != 0, kept)
        torch.testing.assert_close(
            o[o != 0].float(), torch.full_like(o[o != 0].float(), 1 / 64 / (1 - p)), rtol=2e-3, atol=0
        )


@pytest.mark.parametrize("arch", ARCHES)
def test_calls_of_one_shape_differ_by_their_seed_alone(arch):
    """What is bound to the shapes does not keep a seed; p = 0 is the kernel without dropout bit for bit."""
    q, k, v, _ = support.random_inputs(2, 300, 300, 4, 4, 128, dtype=torch.bfloat16, device="cuda")
    kernel, plain = (flashgen.compile(128, arch=arch, dropout=dropout) for dropout in (True, False))
    one, _ = kernel.forward(q, k, v, dropout_p=0.1, dropout_seed=1)
    other, _ = kernel.forward(q, k, v, dropout_p=0.1, dropout_seed=2)
    further, _ = kernel.forward(q, k, v, dropout_p=0.1, dropout_seed=1, dropout_offset=1)
    again, _ = kernel.forward(q, k, v, dropout_p=0.1, dropout_seed=1)
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, further)
    o, lse = kernel.forward(q, k, v, dropout_p=0.0)
    assert all(torch.equal(x, y) for x, y in zip((o, lse), plain.forward(q, k, v), strict=True))


def test_few_queries_of_grouped_heads():
    """Whose heads would share a tile without dropout."""
    kernel = flashgen.compile(128, sinks=True, dropout=True)
    report(fails(kernel, 128, ((1, 700), (17, 300)), (16, 2)))
