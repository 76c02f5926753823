"""Functions that read arrays, on the GPU, forward and backward, on both families, against dense float64 attention."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402
from functions import READING_MASKS, READING_SCORES, arrays_of  # noqa: E402

import flashgen  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = ((113, 203), (512, 256), (700, 1100))  # ragged, rows that see no key, many tiles
EVERY = [*((name, None) for name in READING_MASKS), *((None, name) for name in READING_SCORES), ("document", "bias")]


def on_gpu(array):
    """With the order of its axes, and with strides of zero where it has them on the host."""
    dense = torch.from_numpy(array.copy(order="K")).cuda()
    return dense[tuple(slice(0, 1) if step == 0 else slice(None) for step in array.strides)].expand(array.shape)


def fails(kernel, head_dim, lengths, heads=(4, 2), dtype=torch.bfloat16, cast=None):
    """Sentences on what the kernel gets wrong at some lengths. cast: the type of the arrays of the score function."""
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        tensors = support.random_inputs(2, seqlen_q, seqlen_k, *heads, head_dim, dtype=dtype, device="cuda", seed=seed)
        arrays = arrays_of(kernel.spec, 2, heads[0], seqlen_q, seqlen_k, seed)
        aux = {name: on_gpu(array) for name, array in arrays.items()}
        if cast is not None:
            aux = {name: x.to(cast) if x.is_floating_point() else x for name, x in aux.items()}
        given = {f"{kind}_aux": [aux[name] for name in aux if name.startswith(kind)] for kind in ("mask", "score")}
        options = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}

        def attend(q, k, v, given=given):
            return kernel(q, k, v, return_lse=True, **given)

        found += [f"({seqlen_q}, {seqlen_k}) {x}" for x in support.failures(attend, *tensors, aux=aux, **options)]
    return found


def compiled(head_dim, mask, score, **options):
    mods = {"mask_mod": READING_MASKS.get(mask), "score_mod": READING_SCORES.get(score)}
    return flashgen.compile(head_dim, **mods, **options)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("mask", "score"), EVERY)
def test_every_function_that_reads(mask, score, arch):
    report(fails(compiled(128, mask, score, arch=arch), 128, LENGTHS))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("mask", "score"), [("document", None), (None, "bias")])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_head_dims(head_dim, mask, score, arch):
    report(fails(compiled(head_dim, mask, score, arch=arch, causal=False), head_dim, LENGTHS))


@pytest.mark.parametrize("arch", ARCHES)
def test_deterministic(arch):
    report(fails(compiled(128, "document", "relative", arch=arch, deterministic=True), 128, LENGTHS))


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_arrays_of_sixteen_bits(cast):
    report(fails(compiled(64, None, "bias"), 64, LENGTHS, cast=cast))


@pytest.mark.parametrize(("mask", "score"), [("document", None), (None, "relative")])
def test_heads_that_share_a_tile_read_what_is_theirs(mask, score):
    report(fails(compiled(128, mask, score), 128, ((1, 700), (17, 300)), (16, 2)))


def test_strides_beyond_32_bits():
    """A bias whose heads lie 2^31 elements apart, in memory that they share with others."""
    q, k, v = (torch.randn(1, 128, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    memory = torch.empty(2**31 + 128 * 128, device="cuda", dtype=torch.bfloat16)
    far = memory.as_strided((1, 2, 128, 128), (0, 2**31, 128, 1))
    far.copy_(torch.randn(1, 2, 128, 128, device="cuda"))
    kernel = compiled(64, None, "bias")
    expected = kernel(q, k, v, score_aux=(far.clone(memory_format=torch.contiguous_format),))
    assert torch.equal(kernel(q, k, v, score_aux=(far,)), expected)
