"""Score functions whose arrays are copied by tiles, on Hopper, in both directions, against dense float64 attention."""

import logging
import statistics
from functools import partial

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import report  # noqa: E402
from tile_scores import OUTER, READING  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

# Rows of arrays are whole 16 bytes: ragged tiles, rows that see no key, one block of keys, many tiles.
LENGTHS = ((113, 208), (512, 256), (65, 64), (700, 1096))


def arrays_for(name, lengths, seed, dtype=torch.bfloat16, more=(0, 0), height=1.0):
    """An array for each that a function reads; more: rows and columns beyond the sequences, filled with NaN."""
    draw = torch.Generator(device="cuda").manual_seed(seed)
    seqlen_q, seqlen_k = lengths
    found = []
    for outer in OUTER[name]:
        array = torch.full((*outer, seqlen_q + more[0], seqlen_k + more[1]), torch.nan, device="cuda", dtype=dtype)
        values = height * torch.randn((*outer, seqlen_q, seqlen_k), generator=draw, device="cuda")
        array[..., :seqlen_q, :seqlen_k] = values
        found.append(array)
    return found


def copies_tiles(kernel):
    """Whether a forward that has been called copies tiles of what its score function reads."""
    made = [bound.program for call in kernel._bound.values() for bound in call.launches]
    return any("aux_" in item.stages.machine_text for item in made if item.name == "attention_forward")


def fails(kernel, name, head_dim, *, lengths=LENGTHS, heads=(4, 2), tiled=True, **how):
    """Sentences on what a kernel gets wrong at some lengths, or does by element that it should do by tiles."""
    found = []
    for seed, sizes in enumerate(lengths):
        tensors = support.random_inputs(2, *sizes, *heads, head_dim, dtype=torch.bfloat16, device="cuda", seed=seed)
        arrays = arrays_for(name, sizes, seed, **how)
        concrete = kernel.resolve(None, arrays)[0]
        concrete._bound.clear()
        options = {item: getattr(concrete.spec, item) for item in ("causal", "mask", "score")}
        aux = {item.name: array for item, array in zip(concrete.spec.arrays, arrays, strict=True)}

        def attend(q, k, v, arrays=arrays):
            return kernel(q, k, v, return_lse=True, score_aux=arrays)

        found += [f"{sizes} {text}" for text in support.failures(attend, *tensors, aux=aux, **options)]
        if copies_tiles(concrete) is not tiled:
            found.append(f"{sizes} the forward {'copies no' if tiled else 'copies'} tiles")
    return found


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias(head_dim, causal):
    kernel = flashgen.compile(head_dim, causal, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", head_dim))


@pytest.mark.parametrize("name", ["of_heads", "of_none", "two"])
def test_other_functions(name):
    kernel = flashgen.compile(128, True, score_mod=READING[name], arch="sm_90a")
    report(fails(kernel, name, 128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_types(dtype):
    kernel = flashgen.compile(64, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 64, dtype=dtype))


def test_deterministic():
    kernel = flashgen.compile(128, True, score_mod=READING["of_both"], arch="sm_90a", deterministic=True)
    report(fails(kernel, "of_both", 128))


def test_what_lies_beyond_the_sequences_is_not_seen():
    """NaN behind the last query and the last key."""
    kernel = flashgen.compile(128, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 128, lengths=((113, 203), (300, 331)), more=(7, 5)))


def test_steps_that_are_done_again():
    """What is added leaves the guess of the maximum far behind."""
    kernel = flashgen.compile(128, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 128, lengths=((300, 1096),), height=100.0))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_are_bit_equal(head_dim):
    """A stage that is given back before it is read shows in one block of a thousand, in the first step."""
    kernel = flashgen.compile(head_dim, False, score_mod=READING["of_both"], arch="sm_90a")
    q, k, v, do = support.random_inputs(2, 1024, 1024, 64, 64, head_dim, dtype=torch.bfloat16, device="cuda", seed=1)
    given = {"score_aux": arrays_for("of_both", (1024, 1024), 1)}

    def results():
        o, lse = kernel.forward(q, k, v, **given)
        return o, lse, *kernel.backward(q, k, v, o, lse, do, **given)[1:]

    first = results()
    for _ in range(50):
        assert all(torch.equal(*pair) for pair in zip(first, results(), strict=True))


def test_rows_that_tma_cannot_copy_are_read_by_element():
    kernel = flashgen.compile(128, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 128, lengths=((113, 203),), tiled=False))


def test_heads_that_share_a_tile_read_by_element():
    kernel = flashgen.compile(128, True, score_mod=READING["of_none"], arch="sm_90a")
    report(fails(kernel, "of_none", 128, lengths=((17, 304),), heads=(16, 2), tiled=False))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_and_elements_agree(head_dim):
    """The same numbers where TMA can copy them and, one further, where it cannot; beside masks and sinks."""
    q, k, v, do = support.random_inputs(2, 512, 768, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", seed=5)
    ids = (torch.arange(768, device="cuda", dtype=torch.int32) // 100).expand(2, 768).contiguous()
    functions = {"mask_mod": masks.document, "score_mod": scores.bias}
    kernel = flashgen.compile(head_dim, True, window=(300, None), sinks=True, arch="sm_90a", **functions)
    bias = torch.randn(1, 4, 512, 768, device="cuda", dtype=torch.bfloat16).expand(2, 4, 512, 768)
    results = []
    for array in (bias, shifted(bias)):
        given = {"mask_aux": (ids,), "score_aux": (array,), "sinks": torch.zeros(4, device="cuda")}
        o, lse = kernel.forward(q, k, v, **given)
        results.append((o, lse, *kernel.backward(q, k, v, o, lse, do, **given)))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one).all() and torch.isfinite(other).all()
        assert (one.float() - other.float()).abs().max() <= 0.02 * other.float().abs().max()


def shifted(bias):
    """The same numbers, all of the batch in the same memory, which is not 16-byte aligned."""
    memory = torch.empty(bias[:1].numel() + 1, device="cuda", dtype=bias.dtype)[1:].view(bias[:1].shape)
    return memory.copy_(bias[:1]).expand(bias.shape)


def test_how_fast_a_bias_is(capsys):
    """Shows the TFLOP/s of both directions with a bias by tiles, by elements, and without one."""
    speed = {}
    for head_dim, heads in ((64, 32), (128, 16)):
        sizes = (4, 4096, 4096, heads, heads, head_dim)
        q, k, v, do = support.random_inputs(*sizes, dtype=torch.bfloat16, device="cuda")
        bias = torch.randn(1, heads, 4096, 4096, device="cuda", dtype=torch.bfloat16).expand(4, heads, 4096, 4096)
        biased, plain = (flashgen.compile(head_dim, False, score_mod=score) for score in (scores.bias, None))
        by_element = shifted(bias)
        gflop = 4 * 4 * heads * 4096 * 4096 * head_dim / 1e9
        for name, kernel, arrays in (("tiles", biased, bias), ("elements", biased, by_element), ("none", plain, None)):
            given = {} if arrays is None else {"score_aux": (arrays,)}
            o, lse = kernel.forward(q, k, v, **given)
            forward = gflop / timed(partial(kernel.forward, q, k, v, **given))
            backward = 2.5 * gflop / timed(partial(kernel.backward, q, k, v, o, lse, do, **given))
            speed[head_dim, name] = forward, backward
    with capsys.disabled():
        for (head_dim, name), (forward, backward) in speed.items():
            print(f"\nd{head_dim}, bias by {name}: forward {forward:.0f}, backward {backward:.0f} TFLOP/s", end="")
    for head_dim in (64, 128):
        assert speed[head_dim, "tiles"][0] > 1.2 * speed[head_dim, "elements"][0]


def timed(call, rounds=10):
    """The median time of a call, in milliseconds."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def test_the_log_says_why(caplog):
    q, k, v, _ = support.random_inputs(1, 64, 67, 2, 2, 64, dtype=torch.bfloat16, device="cuda", seed=0)
    kernel = flashgen.compile(64, False, score_mod=scores.bias, arch="sm_90a")
    bias = torch.zeros(1, 2, 64, 67, device="cuda", dtype=torch.bfloat16)
    kernel.resolve(None, (bias,))[0]._bound.clear()
    with caplog.at_level(logging.INFO, "flashgen"):
        kernel(q, k, v, score_aux=(bias,))
    assert "rows 67 elements apart" in caplog.text and "element by element" in caplog.text
