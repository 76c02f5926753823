"""`seqused_k` of batches of one length on the GPU, forward and backward, on both families, against dense attention."""

import logging
import math

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402
from test_gpu_blocks import milliseconds  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
LENGTHS = (300, 500)
USED = (500, 0, 211, 1, 256)  # all keys, none, some of a block, one, whole blocks


def counts(used=USED):
    return torch.tensor(used, dtype=torch.int32, device="cuda")


def inputs(head_dim, heads=(4, 2), lengths=LENGTHS, used=USED, dtype=torch.bfloat16):
    """q, k, v, do; keys and values behind those that are used are NaN."""
    arrays = support.random_inputs(len(used), *lengths, *heads, head_dim, dtype=dtype, device="cuda")
    for number, count in enumerate(used):
        for x in arrays[1:3]:
            x[number, count:] = math.nan
    return arrays


def fails(kernel, arrays, used=USED, **given):
    """Sentences on what is wrong with any batch by itself, and with the gradients of what is not used."""
    result = support.evaluate(lambda *x: kernel(*x, seqused_k=counts(used), return_lse=True, **given), *arrays)
    functions = {name: getattr(kernel.spec, name) for name in ("causal", "mask", "score")}
    found = []
    for number, count in enumerate(used):
        one = slice(number, number + 1)
        q, k, v, do = (x[one] for x in arrays)
        own = support.Result(
            result.o[one], result.lse[one], result.dq[one], result.dk[one, :count], result.dv[one, :count]
        )
        wrong = support.judge(own, q, k[:, :count], v[:, :count], do, **functions)
        found += [f"batch {number}: {sentence}" for sentence in wrong]
        if not all((x[number, count:] == 0).all() for x in (result.dk, result.dv)):
            found.append(f"batch {number}: gradients of keys that are not used")
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("causal", [False, True])
def test_every_batch_has_keys_of_its_own(causal, arch):
    report(fails(flashgen.compile(128, causal, arch=arch), inputs(128)))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, True), (256, False)])
def test_other_head_dims_and_the_deterministic_backward(head_dim, deterministic, arch):
    kernel = flashgen.compile(head_dim, True, dtype="float16", arch=arch, deterministic=deterministic)
    arrays = inputs(head_dim, dtype=torch.float16)
    report(fails(kernel, arrays))
    if deterministic:
        first, again = (
            support.evaluate(lambda *x: kernel(*x, seqused_k=counts(), return_lse=True), *arrays) for _ in range(2)
        )
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_window_and_softcap(arch):
    report(fails(flashgen.compile(128, True, window=(100, 0), softcap=5.0, arch=arch), inputs(128)))


def test_a_decoding_step_of_grouped_heads():
    """Heads share a tile; the caches are slices of longer ones, beside each other in every row."""
    used = (1500, 3, 0, 700)
    q, k, v, _ = inputs(128, (16, 2), (1, 1500), used)
    cache = torch.full((4, 2048, 2, 2, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    cache[:, :1500, 0], cache[:, :1500, 1] = k, v
    k, v = (cache[:, :1500, at] for at in range(2))
    found = flashgen.attention(q, k, v, seqused_k=counts(used), check=True)
    for number, count in enumerate(used):
        one = slice(number, number + 1)
        expected = flashgen.attention(q[one], k[one, :count].contiguous(), v[one, :count].contiguous())
        torch.testing.assert_close(found[one], expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("seqlen_k", [1, 300])
def test_layouts(seqlen_k):
    """Rows of one head behind each other, a single row, and a batch of one."""
    used = (seqlen_k, 0, 1)
    q, k, v, _ = (x.transpose(1, 2).contiguous() for x in inputs(64, lengths=(70, seqlen_k), used=used))
    for rows in (slice(0, 3), slice(2, 3)):
        given = [x[rows] for x in (q, k, v)]
        found = flashgen.attention(*given, layout="bhsd", seqused_k=counts(used)[rows])
        turned = (x.transpose(1, 2).contiguous() for x in given)
        expected = flashgen.attention(*turned, seqused_k=counts(used)[rows]).transpose(1, 2)
        torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
        assert torch.isfinite(found).all()


def test_batches_that_lie_no_whole_number_of_rows_apart(caplog):
    q, k, v, _ = inputs(64)
    room = torch.full((2, 5 * 500 * 128 + 5 * 8), math.nan, dtype=torch.bfloat16, device="cuda")
    apart = [x.as_strided(k.shape, (500 * 128 + 8, 128, 64, 1)) for x in room]
    for x, y in zip(apart, (k, v), strict=True):
        x.copy_(y)
    with caplog.at_level(logging.INFO, "flashgen"):
        found = flashgen.attention(q, *apart, seqused_k=counts())
    assert "no whole number of rows" in caplog.text
    torch.testing.assert_close(found, flashgen.attention(q, k, v, seqused_k=counts()), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("arch", ARCHES)
def test_beside_lists_of_blocks(arch):
    ids = (torch.arange(500, device="cuda").int() // 90).repeat(5, 1)
    kernel = flashgen.compile(64, False, mask_mod=masks.document, arch=arch)
    blocks = flashgen.block_mask(masks.document, (ids,), 5, 1, *LENGTHS)
    arrays = inputs(64)
    found, expected = (
        support.evaluate(lambda *x, given=given: kernel(*x, return_lse=True, **given), *arrays)
        for more in ({"block_mask": blocks}, {})
        for given in ({"mask_aux": (ids,), "seqused_k": counts()} | more,)
    )
    for name, x, y in zip(found._fields, found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=3e-2, rtol=3e-2, msg=name)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.standard_normal((2, 70, 2, 64), dtype=cupy.float32).astype(cupy.float16) for _ in range(3))
    found = flashgen.attention(q, k, v, True, seqused_k=cupy.array([70, 33], dtype=cupy.int32), check=True)
    expected = flashgen.attention(q[1:], k[1:, :33].copy(), v[1:, :33].copy(), True)
    cupy.testing.assert_allclose(found[1:].astype("f4"), expected.astype("f4"), atol=4e-3)


def test_a_captured_call_reads_the_numbers_when_it_runs():
    q, k, v, _ = support.random_inputs(3, 100, 300, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    used = counts((300, 0, 7))
    flashgen.attention(q, k, v, seqused_k=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashgen.attention(q, k, v, seqused_k=used)
    used.copy_(counts((3, 200, 64)))
    graph.replay()
    torch.testing.assert_close(o, flashgen.attention(q, k, v, seqused_k=used), atol=1e-2, rtol=1e-2)


def test_a_call_does_not_wait_for_the_device():
    q, k, v, _ = inputs(64)
    used = counts()
    flashgen.attention(q, k, v, seqused_k=used)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashgen.attention(q, k, v, seqused_k=used)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_numbers_out_of_range():
    """Unchecked, more keys than there are count as all, and fewer than none as none; nothing outside is read."""
    q, k, v, _ = support.random_inputs(3, 100, 300, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    found = flashgen.attention(q, k, v, True, seqused_k=counts((2**31 - 1, -5, 301)))
    torch.testing.assert_close(found, flashgen.attention(q, k, v, True, seqused_k=counts((300, 0, 300))))
    with pytest.raises(ValueError, match="seqused_k must be from 0"):
        flashgen.attention(q, k, v, seqused_k=counts((300, 0, 301)), check=True)


def test_check_finds_reads_outside_of_an_array():
    q, k, v, _ = inputs(64)
    ids = torch.zeros(5, 500, dtype=torch.int32, device="cuda")
    kernel = flashgen.compile(64, False, mask_mod=masks.document)
    kernel(q, k, v, mask_aux=(ids,), check=True)
    kernel(q, k, v, mask_aux=(ids,), seqused_k=counts(), check=True)
    kernel(q, k, v, mask_aux=(ids[:, :300],), seqused_k=counts((300, 0, 211, 1, 256)), check=True)
    for bad in (ids[:4], ids[:, :499]):
        with pytest.raises(ValueError, match="mask_mod reads outside of mask_aux's ids"):
            kernel(q, k, v, mask_aux=(bad,), check=True)
    packed = flashgen.compile(64, False, varlen=True, mask_mod=lambda b, h, q_idx, kv_idx, ids: ids[b, kv_idx] >= 0)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    told = [torch.arange(6, device="cuda").int() * length for length in LENGTHS]
    packed(*flat, *told, mask_aux=(ids,), check=True)
    with pytest.raises(ValueError, match="mask_mod reads outside of mask_aux's ids"):
        packed(*flat, *told, mask_aux=(ids[:, :499],), check=True)


def test_work_is_that_of_the_used_keys():
    """An eighth of the keys of each batch takes less than a third of the time, forward and backward."""
    q, k, v, do = support.random_inputs(8, 2048, 8192, 8, 8, 128, dtype=torch.bfloat16, device="cuda")
    kernel = flashgen.compile(128, False)
    times = {}
    for part in (1, 8):
        used = counts((8192 // part,) * 8)
        o, lse = kernel.forward(q, k, v, seqused_k=used)
        times["forward", part] = milliseconds(lambda used=used: kernel.forward(q, k, v, seqused_k=used))
        times["backward", part] = milliseconds(
            lambda used=used, o=o, lse=lse: kernel.backward(q, k, v, o, lse, do, seqused_k=used), repeats=3
        )
    times["forward", "without"] = milliseconds(lambda: kernel.forward(q, k, v))
    print(times)
    for stage in ("forward", "backward"):
        assert times[stage, 8] < times[stage, 1] / 3, times
