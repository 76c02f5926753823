"""Packed sequences with sinks and dropout on the GPU, on both families, against dense float64 attention of each."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import packed_denominators  # noqa: E402
from cases import report  # noqa: E402
from test_gpu_varlen import KEYS, QUERIES, inputs, offsets  # noqa: E402

import flashgen  # noqa: E402
from flashgen import scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
P, SEED, OFFSET = 0.2, 2**63 + 99, 2**31 + 3
GIVEN = {"dropout_p": P, "dropout_seed": SEED, "dropout_offset": OFFSET}
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0), "softcap": 5.0},
    "alibi": {"causal": True, "score_mod": scores.alibi, "deterministic": True},
}


def fails(kernel, dropout, queries=QUERIES, keys=KEYS, heads=(4, 2), head_dim=128, used=None, **more):
    """Sentences on what the kernel gets wrong, its sinks included."""
    arrays, told = inputs(queries, keys, heads, (head_dim, head_dim), kernel.spec.dtype.name)
    sinks = torch.linspace(-3.0, 4.0, heads[0], device="cuda")
    options = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")} | {"used": used}
    given = dict(GIVEN) if dropout else {}
    if dropout:
        sizes = (len(queries), heads[0], max(queries), max(keys))
        options |= {"keep": torch.from_numpy(flashgen.dropout_mask(SEED, OFFSET, P, *sizes)).cuda(), "p": P}
    if used is not None:
        given["seqused_k"] = torch.tensor(used, dtype=torch.int32, device="cuda")

    def attend(q, k, v, t):
        return kernel(q, k, v, *told, sinks=t, return_lse=True, **given, **more)

    return packed_denominators.failures(attend, arrays, sinks, *(of.tolist() for of in told), **options)


def compiled(head_dim=128, dropout=True, **options):
    return flashgen.compile(head_dim, **{"causal": False} | options, varlen=True, sinks=True, dropout=dropout)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", OPTIONS)
def test_sinks_and_dropout(name, arch):
    report(fails(compiled(**OPTIONS[name], arch=arch), True))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_head_dims_and_used_keys(head_dim, arch):
    used = (100, 40, 1, 0, 63, 0, 0, 1, 70)
    kernel = compiled(head_dim, causal=True, dtype="float16", arch=arch, dropout=head_dim == 64)
    report(fails(kernel, head_dim == 64, head_dim=head_dim, used=used))


def test_heads_that_share_a_tile_have_their_own_sinks():
    kernel = compiled(causal=True, dropout=False)
    report(fails(kernel, False, (1, 17, 0, 9, 1), (700, 300, 5, 0, 64), (16, 2), max_seqlen_q=17))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_padded_batch_drops_the_same(arch):
    q, k, v = (torch.randn(3, 200, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    told = (offsets((200,) * 3),) * 2
    packed = flashgen.compile(64, True, varlen=True, dropout=True, arch=arch)
    dense = flashgen.compile(64, True, dropout=True, arch=arch)
    found = packed(*(x.flatten(0, 1) for x in (q, k, v)), *told, **GIVEN).unflatten(0, (3, 200))
    torch.testing.assert_close(found, dense(q, k, v, **GIVEN), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_gradient_of_sinks_repeats(arch):
    kernel = compiled(64, causal=True, arch=arch, dropout=False)
    (q, k, v, do), told = inputs(QUERIES, KEYS, (4, 2), (64, 64))
    sinks = torch.linspace(-3.0, 4.0, 4, device="cuda")
    o, lse = kernel.forward(q, k, v, *told, sinks=sinks)
    first, *others = (kernel.backward(q, k, v, o, lse, do, None, *told, sinks=sinks)[3] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)
    for queries in ((), (0, 0)):  # no rows: nothing is read of workspaces that nothing has written
        (q, k, v, do), told = inputs(queries, queries, (4, 2), (64, 64))
        o, lse = kernel.forward(q, k, v, *told, sinks=sinks)
        assert not kernel.backward(q, k, v, o, lse, do, None, *told, sinks=sinks)[3].any()
