"""Block lists on the GPU, forward and backward, on both families, against dense attention and without lists; timed."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = ((113, 203), (512, 256), (700, 1100))  # ragged, rows that see no key, many tiles


def documents(batch, seqlen, count, seed=0):
    """ids (batch, seqlen) of documents of random lengths, in ascending order."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.stack([torch.randperm(seqlen - 1, generator=draw)[: count - 1].sort().values for _ in range(batch)])
    ids = torch.searchsorted(ends, torch.arange(seqlen).expand(batch, seqlen).contiguous(), right=False)
    return ids.int().cuda()


def by_head(b, h, q_idx, kv_idx, ids):
    """Even heads see their own document, odd ones the documents before it too."""
    return (ids[b, q_idx] == ids[b, kv_idx]) | ((h % 2 == 1) & (ids[b, q_idx] > ids[b, kv_idx]))


def nothing(b, h, q_idx, kv_idx, ids):
    return ids[b, kv_idx] < 0


MASKS = {"document": (masks.document, 1), "by_head": (by_head, 4), "nothing": (nothing, 1)}


def fails(head_dim, mask, arch, lengths=LENGTHS, heads=(4, 2), block_size=64, causal=True, **options):
    """Sentences on what a kernel with lists gets wrong at some lengths."""
    mask_mod, of_heads = MASKS[mask]
    kernel = flashgen.compile(head_dim, causal, mask_mod=mask_mod, arch=arch, **options)
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask")}
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        tensors = support.random_inputs(
            2, seqlen_q, seqlen_k, *heads, head_dim, dtype=torch.bfloat16, device="cuda", seed=seed
        )
        ids = documents(2, max(seqlen_q, seqlen_k), 5, seed)
        sizes = (2, of_heads, seqlen_q, seqlen_k)
        blocks = flashgen.block_mask(mask_mod, (ids,), *sizes, causal=causal, block_size=block_size)

        def attend(q, k, v, ids=ids, blocks=blocks):
            return kernel(q, k, v, return_lse=True, mask_aux=(ids,), block_mask=blocks)

        support.poison(*tensors)
        wrong = support.failures(attend, *tensors, aux={"mask_ids": ids}, **functions)
        found += [f"({seqlen_q}, {seqlen_k}) {x}" for x in wrong]
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask, causal, arch):
    report(fails(128, mask, arch, causal=causal))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_head_dims(head_dim, arch):
    report(fails(head_dim, "document", arch))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("block_size", [16, 128])
def test_blocks_that_are_smaller_and_larger_than_tiles(block_size, arch):
    report(fails(128, "document", arch, block_size=block_size))


@pytest.mark.parametrize("arch", ARCHES)
def test_deterministic(arch):
    report(fails(128, "document", arch, deterministic=True))


def test_few_queries_of_grouped_heads():
    """Heads that share a tile."""
    report(fails(128, "document", None, lengths=((1, 700), (17, 300)), heads=(16, 2)))


@pytest.mark.parametrize("of_heads", [1, 4])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_what_is_visible_is_counted_right(block_size, of_heads):
    """The counts, by the kernel, are those of the dense mask."""
    ids = documents(2, 1100, 7)
    mask_mod = by_head if of_heads > 1 else masks.document
    blocks = flashgen.block_mask(mask_mod, (ids,), 2, of_heads, 700, 1100, block_size=block_size)
    names = [torch.arange(n, device="cuda") for n in (2, of_heads, 700, 1100)]
    b, h, q_idx, kv_idx = torch.meshgrid(*names, indexing="ij")
    dense = mask_mod(b, h, q_idx, kv_idx, ids)
    rows, columns = -(-700 // block_size), -(-1100 // block_size)
    padded = torch.zeros(2, of_heads, rows * block_size, columns * block_size, device="cuda")
    padded[:, :, :700, :1100] = dense
    counts = padded.reshape(2, of_heads, rows, block_size, columns, block_size).sum((3, 5))
    assert torch.equal(blocks._visible, counts)


def test_cupy_arrays():
    """A library whose operations make the lists without torch."""
    cupy = pytest.importorskip("cupy")
    draw = cupy.random.default_rng(0)
    q, k, v = (draw.standard_normal((2, 700, heads, 64), dtype="float32").astype("float16") for heads in (4, 2, 2))
    ids = cupy.sort(draw.integers(0, 5, (2, 700)).astype("int32"), -1)
    kernel = flashgen.compile(64, True, dtype="float16", mask_mod=masks.document)
    blocks = flashgen.block_mask(masks.document, (ids,), 2, 1, 700, 700, causal=True)
    expected, lse = kernel.forward(q, k, v, mask_aux=(ids,))
    found, _ = kernel.forward(q, k, v, mask_aux=(ids,), block_mask=blocks)
    assert float(cupy.abs(found - expected).max()) < 2e-2
    given = {"mask_aux": (ids,)}
    gradients = kernel.backward(q, k, v, expected, lse, q, **given)
    for one, other in zip(
        gradients, kernel.backward(q, k, v, expected, lse, q, block_mask=blocks, **given), strict=True
    ):
        assert float(cupy.abs(one.astype("float32") - other.astype("float32")).max()) < 5e-2


def test_captured_in_a_graph():
    """Lists that are made within a capture belong to the graph; calls outside of it make their own."""
    q, k, v, _ = support.random_inputs(1, 700, 700, 4, 2, 128, dtype=torch.bfloat16, device="cuda")
    ids = documents(1, 700, 5)
    kernel = flashgen.compile(128, True, mask_mod=masks.document)
    expected = kernel(q, k, v, mask_aux=(ids,))
    blocks = flashgen.block_mask(masks.document, (ids,), 1, 1, 700, 700, causal=True)
    kernel(
        q, k, v, mask_aux=(ids,), block_mask=flashgen.block_mask(masks.document, (ids,), 1, 1, 700, 700, causal=True)
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    outside = kernel(q, k, v, mask_aux=(ids,), block_mask=blocks)
    graph.replay()
    torch.cuda.synchronize()
    for found in (o, outside):
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def milliseconds(call, repeats=10):
    """Of one call, the best of three rounds."""
    call()
    best = float("inf")
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) / repeats)
    return best


@pytest.mark.parametrize("arch", ARCHES)
def test_sixteen_documents_at_16k_take_a_third_of_the_time(arch):
    """Of the blocks about an eighth is visited; a third leaves slack for the longest document's tail."""
    seqlen = 16384
    q, k, v, do = support.random_inputs(1, seqlen, seqlen, 8, 8, 128, dtype=torch.bfloat16, device="cuda")
    ids = documents(1, seqlen, 16)
    kernel = flashgen.compile(128, False, mask_mod=masks.document, arch=arch)
    blocks = flashgen.block_mask(masks.document, (ids,), 1, 1, seqlen, seqlen)
    o, lse = kernel.forward(q, k, v, mask_aux=(ids,))
    times = {}
    for name, given in (("all", {}), ("listed", {"block_mask": blocks})):
        times["forward", name] = milliseconds(lambda given=given: kernel.forward(q, k, v, mask_aux=(ids,), **given))
        times["backward", name] = milliseconds(
            lambda given=given: kernel.backward(q, k, v, o, lse, do, mask_aux=(ids,), **given), repeats=5
        )
    shown = f"{arch}, {blocks.density():.3f} of the blocks: " + ", ".join(
        f"{' '.join(key)} {value:.3f} ms" for key, value in times.items()
    )
    print(shown)
    for stage in ("forward", "backward"):
        assert times[stage, "all"] > 3 * times[stage, "listed"], shown


def test_making_a_block_mask_takes_little_memory_and_time():
    """131072 tokens: 2048 x 2048 blocks of 4 bytes, where the mask has 2^34 elements."""
    seqlen = 131072
    ids = documents(1, seqlen, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blocks = flashgen.block_mask(masks.document, (ids,), 1, 1, seqlen, seqlen, causal=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * 2048**2 + 2**20
    assert 0 < blocks.density() < 0.1
