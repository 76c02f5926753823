"""Vectors of what functions read by row or by column alone, in Hopper's forward, against dense float64 attention."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

LENGTHS = ((113, 203), (512, 256), (700, 1100))  # ragged, rows that see no key, many tiles
LARGE = 1 << 24  # from here on float32 does not tell neighbours apart


def ranked(b, h, q_idx, kv_idx, rank):
    """Loads by column from two places of one array, the second behind its end for the last key."""
    return (rank[b, q_idx] >= rank[b, kv_idx]) & (rank[b, kv_idx] != rank[b, kv_idx + 1])


def of_keys(score, b, h, q_idx, kv_idx, table, kind):
    """A number of the kind of a key."""
    return score + table[kind[kv_idx], h] - table[kind[q_idx], 0]


def arrays(seqlen, heads, dtype, seed):
    """Named as the kernels name them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "mask_ids": torch.randint(0, 5, (2, seqlen), generator=draw).sort().values.int().cuda(),
        "mask_rank": (LARGE + torch.randint(0, 4, (2, seqlen), generator=draw)).int().cuda(),
        "score_table": torch.randn(3, heads, generator=draw).to(dtype).cuda(),
        "score_kind": torch.randint(0, 3, (2 * seqlen,), generator=draw).int().cuda()[::2],
    }


def fails(head_dim, mask=None, score=None, *, listed=False, causal=True, heads=(4, 2), lengths=LENGTHS, dtype=None):
    """Sentences on what the kernel gets wrong at some lengths."""
    kernel = flashgen.compile(head_dim, causal, mask_mod=mask, score_mod=score, arch="sm_90a")
    options = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        sizes = (2, seqlen_q, seqlen_k, *heads, head_dim)
        tensors = support.random_inputs(*sizes, dtype=torch.bfloat16, device="cuda", seed=seed)
        every = arrays(max(seqlen_q, seqlen_k), heads[0], dtype or torch.float32, seed)
        aux = {item.name: every[item.name] for item in kernel.spec.arrays}
        given = {f"{kind}_aux": tuple(aux[name] for name in aux if name.startswith(kind)) for kind in ("mask", "score")}
        if listed:
            blocks = flashgen.block_mask(mask, given["mask_aux"], 2, 1, seqlen_q, seqlen_k, causal=causal)
            given["block_mask"] = blocks

        def attend(q, k, v, given=given):
            return kernel(q, k, v, return_lse=True, **given)

        support.poison(*tensors)
        found += [f"({seqlen_q}, {seqlen_k}) {x}" for x in support.failures(attend, *tensors, aux=aux, **options)]
    return found


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
def test_documents(head_dim, listed):
    """Head dims whose tiles have different widths, also such that are no multiple of the 64 columns held at a time."""
    report(fails(head_dim, masks.document, listed=listed))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_several_loads_and_large_integers(listed, causal):
    report(fails(128, ranked, listed=listed, causal=causal))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_by_column(dtype):
    report(fails(64, None, of_keys, dtype=dtype))


@pytest.mark.parametrize("score", [scores.alibi, of_keys])
def test_with_a_score_function(score):
    """With ALiBi there is no guess of the maximum."""
    report(fails(128, masks.document, score, listed=True))


def test_heads_that_share_a_tile():
    report(fails(128, masks.document, listed=True, heads=(16, 2), lengths=((1, 700), (17, 300))))


def test_documents_of_many_tiles():
    """Tiles of queries in which a document ends, whose next one begins many steps later."""
    report(fails(64, masks.document, listed=True, heads=(1, 1), lengths=((3000, 3000),)))
