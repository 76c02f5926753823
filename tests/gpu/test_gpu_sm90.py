"""The Hopper family, the default on capability 9.0: what the grid does not ask, equal repeats, streams, strides."""

import logging

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import DTYPES, LENGTHS, Spec, attend, differing, inputs, report  # noqa: E402

import flashgen  # noqa: E402
from flashgen.kernel import Kernel  # noqa: E402
from flashgen.plan import tuned  # noqa: E402
from flashgen.plan.arch import parse_arch  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCH = "sm_90a"
MAIN = [Spec(d, causal) for d in (64, 128, 256) for causal in (False, True)]


@pytest.mark.parametrize("spec", [Spec(64)], ids=str)
def test_it_is_the_default(kernel, spec):
    assert kernel.plan["attention_forward"].arch.name == ARCH


@pytest.mark.parametrize("spec", [spec._replace(arch="sm_90") for spec in MAIN], ids=str)
def test_the_portable_kernels_run_where_they_are_asked_for(kernel, spec):
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        arrays = inputs(spec, 1, seqlen_q, seqlen_k, 4, 2, seed=seed)
        sentences = support.failures(attend(kernel), *arrays, causal=spec.causal)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


TILES = sorted({(*key[2:5], length) for key in tuned.TABLE if key[6] for length in ("", key[6])})


@pytest.mark.parametrize(("head_dim", "head_dim_v", "causal", "length"), TILES)
def test_the_tile_of_a_length_is_right_for_every_length(monkeypatch, head_dim, head_dim_v, causal, length):
    monkeypatch.setattr(tuned, "length", lambda *_: length)
    spec = flashgen.Spec(head_dim, head_dim_v, causal=causal)
    kernel = Kernel(spec, parse_arch(ARCH), "bshd", "auto", False)  # not one that has bound calls before
    found = []
    for seed, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        arrays = inputs(Spec(head_dim, causal, head_dim_v), 2, seqlen_q, seqlen_k, 4, 2, seed=seed)
        sentences = support.failures(attend(kernel), *arrays, causal=causal)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    report(found)


@pytest.mark.parametrize("factor", [20, 1000], ids=["grows", "jumps"])
@pytest.mark.parametrize("spec", [spec._replace(dtype=dtype) for spec in MAIN for dtype in DTYPES], ids=str)
def test_guesses_of_the_maximum_that_were_too_low(kernel, spec, factor):
    """Later keys score higher than the bias allows, and than exp2 can take."""
    found = []
    for seqlen_q, seqlen_k in ((300, 500), (700, 400), (64, 2000)):
        q, k, v, do = inputs(spec, 2, seqlen_q, seqlen_k, 4, 2)
        k[:, seqlen_k // 2 :] *= factor / 10
        k[:, : seqlen_k // 2] /= 10
        with torch.no_grad():
            o, lse = kernel(q, k, v, return_lse=True)
        ref, low = (support.dense(q, k, v, do, causal=spec.causal, dtype=x) for x in (torch.float64, q.dtype))
        found += [support.lse_violation(lse, ref.lse), support.violation("o", o, ref.o, low.o, 2, q.dtype)]
    report([sentence for sentence in found if sentence])


@pytest.mark.parametrize("spec", [Spec(128, True)], ids=str)
def test_launches_on_two_streams_at_once(kernel, spec):
    """Each stream has a counter of its own, or tiles would be left out."""
    q, k, v, _ = inputs(spec, 2, 2000, 2000, 8, 2)
    want = kernel(q, k, v)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(kernel(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want) for o in outputs)


@pytest.mark.parametrize("spec", [Spec(64, True)], ids=str)
def test_a_captured_graph_runs_beside_launches_on_its_stream(kernel, spec):
    q, k, v, _ = inputs(spec, 2, 2000, 2000, 8, 2)
    with torch.no_grad():
        want = kernel(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first, second = kernel(q, k, v), kernel(q, k, v)
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        outputs = []
        for _ in range(20):
            with torch.cuda.stream(other):
                graph.replay()
            outputs.append(kernel(q, k, v))
        torch.cuda.synchronize()
    assert all(torch.equal(o, want) for o in (first, second, *outputs))


@pytest.mark.parametrize("lengths", [(4224, 4224), (2000, 4000)])
@pytest.mark.parametrize("spec", [Spec(d, True) for d in (64, 128, 256)], ids=str)
def test_forward_repeats_bit_for_bit(kernel, spec, lengths):
    q, k, v, _ = inputs(spec, 1, *lengths, 4, 2)
    with torch.no_grad():
        first = kernel(q, k, v, return_lse=True)
        for _ in range(1000):
            again = kernel(q, k, v, return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("spec", [Spec(256, causal) for causal in (False, True)], ids=str)
def test_backward_of_wide_heads_repeats_bit_for_bit(kernel, spec):
    """Though not asked to: dQ has a kernel of its own there, and nothing is added atomically."""
    assert "attention_backward_dq" in kernel.plan and not spec.deterministic
    arrays = inputs(spec, 2, 1023, 1024, 6, 2)
    first = support.evaluate(attend(kernel), *arrays)
    assert not differing(kernel, arrays, first)


@pytest.mark.parametrize("spec", [Spec(64, False, 40), Spec(192, True, 128)], ids=str)
def test_value_head_dims_apart(kernel, spec):
    arrays = inputs(spec, 2, 300, 500, 4, 2)
    report(support.failures(attend(kernel), *arrays, causal=spec.causal))


@pytest.mark.parametrize("spec", [Spec(64, True, layout="bhsd")], ids=str)
def test_the_other_layout(kernel, spec):
    q, k, v, _ = inputs(spec, 2, 300, 500, 4, 2)
    o = kernel(*(x.transpose(1, 2) for x in (q, k, v)))
    import flashgen

    assert torch.equal(o.transpose(1, 2), flashgen.compile(64, True)(q, k, v))


GROUPS = (2, 4, 8, 16)
HEADS_KV = 2


def heads_in_tile(kernel):
    """Of the kernel that the last forward of a call was prepared for."""
    calls = [call for call in kernel._bound.values() if not call.backward]
    return calls[-1].launches[0].program.stages.plan.packed


@pytest.fixture
def fresh(spec, kernel):
    """A kernel object without calls, so that the last one is this test's; its programs are those of all."""
    from flashgen.kernel import Kernel

    return Kernel(kernel.spec, kernel.arch, kernel.layout, kernel.target, False)


@pytest.mark.parametrize("seqlen_q", [1, 3, 17, 64])
@pytest.mark.parametrize("spec", MAIN, ids=str)
def test_few_queries_of_grouped_heads_share_a_tile(fresh, spec, seqlen_q):
    """Keys that are fewer than the queries (causal: rows without keys), a few tiles of them, and many."""
    found = []
    for group in GROUPS:
        for seed, seqlen_k in enumerate((2, 200, 3001)):
            arrays = inputs(spec, 3, seqlen_q, seqlen_k, HEADS_KV * group, HEADS_KV, seed=seed)
            sentences = support.failures(attend(fresh), *arrays, causal=spec.causal)
            found += [f"group {group}, {seqlen_k} keys: {sentence}" for sentence in sentences]
            assert heads_in_tile(fresh) > 1
    report(found)


@pytest.mark.parametrize("spec", [*MAIN, Spec(64, True, dtype="float16"), Spec(192, True, 128)], ids=str)
def test_packed_tiles_of_every_number_of_heads(fresh, spec):
    """Several blocks of queries, ragged at the end; one query; two blocks of heads; groups of odd multiples."""
    found, packed = [], set()
    cases = [(1, 64, 1), (2, 32, 1), (1, 128, 1), (1, 6, 2), (1, 12, 3), (9, 5, 2), (150, 8, 2), (131, 4, 3)]
    for seqlen_q, group, heads_kv in cases:
        arrays = inputs(spec, 2, seqlen_q, 300, group * heads_kv, heads_kv, seed=seqlen_q)
        sentences = support.failures(attend(fresh), *arrays, causal=spec.causal)
        found += [f"{seqlen_q} queries, group {group}: {sentence}" for sentence in sentences]
        packed.add(heads_in_tile(fresh))
    report(found)
    assert {1, 2, 4, 32, 64} <= packed


@pytest.mark.parametrize("spec", [Spec(128, True, layout="bhsd"), Spec(64, layout="bhsd")], ids=str)
def test_packed_tiles_in_the_other_layout(fresh, spec):
    import flashgen

    for seqlen_q in (1, 17):
        q, k, v, _ = inputs(spec, 2, seqlen_q, 500, 16, 2)
        o, lse = fresh(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), return_lse=True)
        assert heads_in_tile(fresh) > 1
        want, want_lse = flashgen.compile(spec.head_dim, spec.causal)(q, k, v, return_lse=True)
        assert torch.equal(o.transpose(1, 2), want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("spec", [Spec(128, True), Spec(64)], ids=str)
def test_packed_tiles_of_slices(fresh, spec):
    """Heads of a fused projection, a slice of a cache: strides of heads, rows and batches that leave gaps."""
    batch, seqlen_q, heads, heads_kv, dim = 3, 5, 16, 2, spec.head_dim
    fused = torch.randn(batch, seqlen_q, heads + 2 * heads_kv, dim, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(2, batch, 1000, heads_kv, dim, dtype=torch.bfloat16, device="cuda")
    q, (k, v) = fused[:, :, :heads], cache[:, :, 100:777]
    with torch.no_grad():
        o, lse = fresh(q, k, v, return_lse=True)
        assert heads_in_tile(fresh) == 8
        want = fresh(*(x.contiguous() for x in (q, k, v)), return_lse=True)
    assert torch.equal(o, want[0]) and torch.equal(lse, want[1])
    ref, low = (
        support.dense(q, k, v, torch.zeros_like(q), causal=spec.causal, dtype=x) for x in (torch.float64, q.dtype)
    )
    sentences = [support.lse_violation(lse, ref.lse), support.violation("o", o, ref.o, low.o, 2, q.dtype)]
    report([sentence for sentence in sentences if sentence])


@pytest.mark.parametrize("spec", [Spec(128, True)], ids=str)
def test_packed_tiles_repeat_bit_for_bit(fresh, spec):
    """Rows of a tile behind a head's last query are written by nobody: else, as NaN, over those of another head."""
    q, k, v, _ = inputs(spec, 2, 3, 700, 16, 2)
    with torch.no_grad():
        first = fresh(q, k, v, return_lse=True)
        for _ in range(200):
            support.poison(q, k, v)
            again = fresh(q, k, v, return_lse=True)
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("spec", [Spec(64)], ids=str)
def test_strides_that_tma_cannot_take_run_on_the_portable_family(kernel, spec, caplog):
    q, k, v, do = inputs(spec, 2, 300, 500, 4, 4)
    k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    with caplog.at_level(logging.INFO, "flashgen"):
        report(support.failures(attend(kernel), q, k, v, do, causal=False))
    assert "sm_90 kernels run" in caplog.text
