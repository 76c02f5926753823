"""Score functions whose arrays are copied by tiles, on Hopper, forward and backward, against dense float64 attention."""

import logging
import statistics

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

# Rows of arrays are whole 16 bytes: ragged tiles, rows that see no key, many tiles, one key block.
LENGTHS = ((113, 208), (512, 256), (1, 64), (700, 1096))


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


def fails(kernel, name, head_dim, *, lengths=LENGTHS, heads=(4, 2), tiled=True, caplog=None, **how):
    """Sentences on what a kernel gets wrong at some lengths, or does by element that it should do by tiles."""
    found = []
    for seed, sizes in enumerate(lengths):
        tensors = support.random_inputs(2, *sizes, *heads, head_dim, dtype=torch.bfloat16, device="cuda", seed=seed)
        arrays = arrays_for(name, sizes, seed, **how)
        concrete = kernel.resolve(None, arrays)[0]
        options = {item: getattr(concrete.spec, item) for item in ("causal", "mask", "score")}
        aux = {item.name: array for item, array in zip(concrete.spec.arrays, arrays, strict=True)}

        def attend(q, k, v, arrays=arrays):
            return kernel(q, k, v, return_lse=True, score_aux=arrays)

        found += [f"{sizes} {text}" for text in support.failures(attend, *tensors, aux=aux, **options)]
        made = {program.name for call in concrete._bound.values() for bound in call.launches for program in [bound.program]
                if "aux_" in program.stages.machine_text}  # fmt: skip
        if ("attention_forward" in made) is not tiled:
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
    report(fails(kernel, "of_both", 128, lengths=((113, 203), (300, 333)), more=(7, 5)))


def test_steps_that_are_done_again():
    """What is added leaves the guess of the maximum far behind."""
    kernel = flashgen.compile(128, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 128, lengths=((300, 1096),), height=100.0))


def test_rows_that_tma_cannot_copy_are_read_by_element():
    kernel = flashgen.compile(128, False, score_mod=READING["of_both"], arch="sm_90a")
    report(fails(kernel, "of_both", 128, lengths=((113, 203),), tiled=False))


def test_heads_that_share_a_tile_read_by_element():
    kernel = flashgen.compile(128, True, score_mod=READING["of_none"], arch="sm_90a")
    report(fails(kernel, "of_none", 128, lengths=((17, 304),), heads=(16, 2), tiled=False))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_and_elements_agree(head_dim, caplog):
    """The same numbers where TMA can copy them and, a number further, where it cannot; beside a mask, a window, sinks."""
    q, k, v, do = support.random_inputs(2, 512, 768, 4, 2, head_dim, dtype=torch.bfloat16, device="cuda", seed=5)
    ids = (
        torch.arange(768, device="cuda", dtype=torch.int32).div(100, rounding_mode="floor").expand(2, 768).contiguous()
    )
    kernel = flashgen.compile(
        head_dim, True, window=(300, None), mask_mod=masks.document, score_mod=scores.bias, sinks=True, arch="sm_90a"
    )
    bias = torch.randn(1, 4, 512, 768, device="cuda", dtype=torch.bfloat16).expand(2, 4, 512, 768)
    shifted = torch.empty(4 * 512 * 768 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(1, 4, 512, 768)
    shifted = shifted.copy_(bias[:1]).expand(2, 4, 512, 768)
    results = []
    for array in (bias, shifted):
        given = {"mask_aux": (ids,), "score_aux": (array,), "sinks": torch.zeros(4, device="cuda")}
        o, lse = kernel.forward(q, k, v, **given)
        results.append((o, lse, *kernel.backward(q, k, v, o, lse, do, **given)))
    for one, other in zip(*results, strict=True):
        assert torch.isfinite(one[one != -torch.inf]).all()
        assert (one.float() - other.float()).nan_to_num().abs().max() <= 0.02 * other.float().nan_to_num(
            neginf=0
        ).abs().max()


def test_how_fast_a_bias_is(capsys):
    """Shows the forward's and the backward's TFLOP/s with a bias by tiles, by elements, and without one."""
    lines = []
    for head_dim, heads in ((64, 32), (128, 16)):
        q, k, v, do = support.random_inputs(
            4, 4096, 4096, heads, heads, head_dim, dtype=torch.bfloat16, device="cuda", seed=0
        )
        bias = torch.randn(1, heads, 4096, 4096, device="cuda", dtype=torch.bfloat16).expand(4, heads, 4096, 4096)
        shifted = torch.empty(bias[:1].numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(bias[:1].shape)
        shifted = shifted.copy_(bias[:1]).expand(bias.shape)
        biased = flashgen.compile(head_dim, False, score_mod=scores.bias)
        plain = flashgen.compile(head_dim, False)
        work = 4 * 4 * heads * 4096 * 4096 * head_dim / 1e9
        for name, kernel, given in (
            ("tiles", biased, {"score_aux": (bias,)}),
            ("elements", biased, {"score_aux": (shifted,)}),
            ("none", plain, {}),
        ):
            o, lse = kernel.forward(q, k, v, **given)
            forward = timed(lambda kernel=kernel, given=given: kernel.forward(q, k, v, **given))
            backward = timed(
                lambda kernel=kernel, given=given, o=o, lse=lse: kernel.backward(q, k, v, o, lse, do, **given)
            )
            lines.append((head_dim, name, work / forward, 2.5 * work / backward))
        del bias, shifted
    with capsys.disabled():
        for head_dim, name, forward, backward in lines:
            print(f"\nd{head_dim} bias by {name}: forward {forward:.0f}, backward {backward:.0f} TFLOP/s", end="")
    speed = {(head_dim, name): forward for head_dim, name, forward, _ in lines}
    assert all(speed[head_dim, "tiles"] > 1.2 * speed[head_dim, "elements"] for head_dim in (64, 128))


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
