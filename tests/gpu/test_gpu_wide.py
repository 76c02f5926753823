"""Head dims over 256 and values in the keys on the GPU, on both families, against dense float64 attention; 192/128."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import attend, report  # noqa: E402
from functions import MASKS  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = ((113, 203), (512, 256), (1, 300), (700, 1100))  # ragged, rows that see no key, many tiles
DIMS = ((576, 512), (512, 512), (264, 264), (320, 384), (512, 128), (64, 512))
FUNCTIONS = {
    "window": {"window": (100, 10)},
    "softcap": {"causal": True, "softcap": 5.0},
    "alibi": {"causal": True, "score_mod": scores.alibi},
    "top-left": {"causal": "top-left", "window": (64, None), "mask_mod": masks.dilated(2)},
    "nothing": {"mask_mod": MASKS["nothing"]},
}


def functions_of(kernel):
    return {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}


def fails(kernel, lengths=LENGTHS, heads=(4, 2), batch=2):
    """Sentences on what a forward gets wrong at some lengths; v is a view of k with shared_kv."""
    found, spec = [], kernel.spec
    dtype = getattr(torch, spec.dtype.name)
    for seed, sizes in enumerate(lengths):
        dims = (batch, *sizes, *heads, spec.head_dim, spec.head_dim_v)
        q, k, v, _ = support.random_inputs(*dims, dtype=dtype, device="cuda", seed=seed)
        values = k[..., : spec.head_dim_v] if spec.shared_kv else v

        def call(q, k, v):
            return kernel(q, k, *(() if kernel.spec.shared_kv else (v,)), return_lse=True)

        found += [f"{sizes} {x}" for x in support.forward_failures(call, q, k, values, **functions_of(kernel))]
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), DIMS)
def test_wide_heads(head_dim, head_dim_v, causal, arch):
    report(fails(flashgen.compile(head_dim, causal, head_dim_v=head_dim_v, arch=arch)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(576, 512), (512, 512), (272, 264), (576, 128), (64, 64)])
def test_values_in_the_keys(head_dim, head_dim_v, causal, arch):
    kernel = flashgen.compile(head_dim, causal, head_dim_v=head_dim_v, arch=arch, dtype="float16", shared_kv=True)
    report(fails(kernel))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_and_score_functions(name, shared_kv, arch):
    options = {"causal": False} | FUNCTIONS[name]
    report(fails(flashgen.compile(576, head_dim_v=512, arch=arch, shared_kv=shared_kv, **options), LENGTHS[:3]))


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1000), (2, 333), (7, 500)], ids=str)
def test_mla_decodes_with_many_query_heads_of_one_key_head(lengths, shared_kv):
    """128 heads, of which up to 64 share a tile."""
    kernel = flashgen.compile(576, head_dim_v=512, arch="sm_90a", shared_kv=shared_kv)
    report(fails(kernel, (lengths,), (128, 1)))


@pytest.mark.parametrize("arch", ARCHES)
def test_views_of_the_keys_and_of_wider_arrays(arch):
    """v as k[..., :512] for a kernel that takes v; q and k inside of wider rows; heads first; rows that are not
    aligned, which take the portable kernel."""
    q, k, _, _ = support.random_inputs(2, 130, 300, 4, 1, 640, dtype=torch.bfloat16, device="cuda")
    kernel = flashgen.compile(576, head_dim_v=512, arch=arch)
    found = []
    for first in (0, 64, 3):
        mine, keys = (x[..., first : first + 576] for x in (q, k))
        found += support.forward_failures(attend(kernel), mine, keys, keys[..., :512], causal=True)
        shared = flashgen.compile(576, head_dim_v=512, arch=arch, shared_kv=True, layout="bhsd")

        def call(q, k, v, shared=shared):
            o, lse = shared(q.transpose(1, 2), k.transpose(1, 2), return_lse=True)
            return o.transpose(1, 2), lse

        found += support.forward_failures(call, mine, keys, keys[..., :512], causal=True)
    report(found)


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_that_score_far_above_the_guess(dtype, shared_kv):
    """Both warpgroups do a step again whose guess of the maximum was too low, and agree on it."""
    q, k, v, _ = support.random_inputs(1, 300, 900, 4, 1, 576, 512, dtype=getattr(torch, dtype), device="cuda")
    k[:, 150:] *= 16
    k[:, 600:] *= 4
    v = k[..., :512] if shared_kv else v
    kernel = flashgen.compile(576, head_dim_v=512, arch="sm_90a", dtype=dtype, shared_kv=shared_kv)

    def call(q, k, v):
        return kernel(q, k, *(() if shared_kv else (v,)), return_lse=True)

    report(support.forward_failures(call, q, k, v, causal=True))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_sinks_take_their_part(shared_kv, arch):
    q, k, v, _ = support.random_inputs(1, 130, 300, 4, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    v = k[..., :512] if shared_kv else v
    given = (q, k) if shared_kv else (q, k, v)
    kernel = flashgen.compile(576, head_dim_v=512, arch=arch, shared_kv=shared_kv, sinks=True)
    t = torch.tensor([-torch.inf, 0.5, 5.0, -3.0], device="cuda")
    o, lse = kernel(*given, sinks=t, return_lse=True)
    ref = support.dense(q, k, v, torch.zeros_like(o), causal=True)
    total = torch.logaddexp(ref.lse, t.double()[None, :, None])
    expected = ref.o * (ref.lse - total).exp().transpose(1, 2)[..., None]
    assert torch.allclose(lse.double(), total, atol=1e-4) and float((o.double() - expected).abs().max()) < 0.02


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_dropout_is_that_of_its_mask(shared_kv, arch):
    q, k, v, _ = support.random_inputs(1, 130, 300, 4, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    v = k[..., :512] if shared_kv else v
    given = (q, k) if shared_kv else (q, k, v)
    kernel = flashgen.compile(576, False, head_dim_v=512, arch=arch, shared_kv=shared_kv, dropout=True)
    o = kernel(*given, dropout_p=0.25, dropout_seed=2**63 + 5)
    keep = torch.from_numpy(flashgen.dropout_mask(2**63 + 5, 0, 0.25, 1, 4, 130, 300)).cuda()
    s = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) / 576**0.5
    expected = torch.einsum("bhqk,bkd->bqhd", s.softmax(-1) * keep / 0.75, v[:, :, 0].double())
    assert float((o.double() - expected).abs().max()) < 0.02


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_packed_sequences(shared_kv, arch):
    queries, keys = (113, 0, 1, 300, 64, 5), (203, 40, 300, 350, 0, 9)
    q, k, v, _ = support.random_inputs(1, sum(queries), sum(keys), 4, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    v = k[..., :512] if shared_kv else v
    of_q, of_k = (torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()]).int().cuda() for x in (queries, keys))
    kernel = flashgen.compile(576, head_dim_v=512, arch=arch, varlen=True, shared_kv=shared_kv)
    support.poison(q, k, v)
    o, lse = kernel(q[0], k[0], None if shared_kv else v[0], of_q, of_k, return_lse=True)
    found = []
    for n in range(len(queries)):
        rows, cols = slice(int(of_q[n]), int(of_q[n + 1])), slice(int(of_k[n]), int(of_k[n + 1]))
        mine = o[None, rows], lse[None, :, rows]
        part = q[:, rows], k[:, cols], v[:, cols]
        found += [f"{n}: {x}" for x in support.forward_failures(lambda *_, mine=mine: mine, *part, causal=True)]
    report(found)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_lists_of_blocks(shared_kv, arch):
    q, k, v, _ = support.random_inputs(1, 700, 700, 4, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    v = k[..., :512] if shared_kv else v
    ids = (torch.arange(700, device="cuda") // 150).int()[None]
    kernel = flashgen.compile(576, head_dim_v=512, arch=arch, mask_mod=masks.document, shared_kv=shared_kv)
    blocks = flashgen.block_mask(masks.document, (ids,), 1, 1, 700, 700, causal=True)

    def call(q, k, v):
        given = (q, k) if shared_kv else (q, k, v)
        return kernel(*given, return_lse=True, mask_aux=(ids,), block_mask=blocks)

    of_types = kernel.resolve(mask_aux=(ids,), block_mask=blocks)[0]
    report(support.forward_failures(call, q, k, v, aux={"mask_ids": ids}, **functions_of(of_types)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_the_forward_repeats_bit_for_bit(shared_kv, arch):
    q, k, v, _ = support.random_inputs(1, 2000, 4000, 2, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    kernel = flashgen.compile(576, head_dim_v=512, arch=arch, shared_kv=shared_kv)
    given = (q, k) if shared_kv else (q, k, v)
    first = kernel.forward(*given)
    for _ in range(100):
        assert all(torch.equal(x, y) for x, y in zip(kernel.forward(*given), first, strict=True))


def test_gradients_are_refused():
    q, k, v, _ = support.random_inputs(1, 8, 8, 1, 1, 576, 512, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="has no backward"):
        flashgen.attention(q.requires_grad_(), k, v)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", [None, *FUNCTIONS])
def test_192_and_128_forward_and_backward(name, arch):
    options = {"causal": True} if name is None else {"causal": False} | FUNCTIONS[name]
    kernel = flashgen.compile(192, head_dim_v=128, arch=arch, **options)
    found = []
    for seed, sizes in enumerate(LENGTHS):
        arrays = support.random_inputs(2, *sizes, 4, 2, 192, 128, dtype=torch.bfloat16, device="cuda", seed=seed)
        found += [f"{sizes} {x}" for x in support.failures(attend(kernel), *arrays, **functions_of(kernel))]
    report(found)


@pytest.mark.parametrize("arch", ARCHES)
def test_192_and_128_deterministic_float16(arch):
    kernel = flashgen.compile(192, head_dim_v=128, arch=arch, dtype="float16", deterministic=True)
    arrays = support.random_inputs(2, 300, 500, 4, 1, 192, 128, dtype=torch.float16, device="cuda")
    report(support.failures(attend(kernel), *arrays, causal=True))
