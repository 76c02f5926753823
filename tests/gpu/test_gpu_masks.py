"""Masks and score functions on the GPU, forward and backward, on both families, against dense float64 attention."""

from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import support  # noqa: E402
from cases import attend, report  # noqa: E402
from functions import MASKS, SCORES  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks, scores  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

ARCHES = ("sm_90a", "sm_90")
# (seqlen_q, seqlen_k): ragged, more queries than keys (rows that see none), many tiles
LENGTHS = ((113, 203), (512, 256), (1, 300), (700, 1100))


class Draw(NamedTuple):
    """Options of flashgen.compile, with a name."""

    name: str
    options: dict[str, Any]


DRAWS = [
    Draw("window left", {"window": (100, 0)}),
    Draw("window both", {"window": (60, 90)}),
    Draw("window top-left", {"causal": "top-left", "window": (64, None)}),
    Draw("softcap", {"causal": True, "softcap": 5.0}),
    Draw("alibi", {"causal": True, "score_mod": scores.alibi}),
    Draw("prefix", {"mask_mod": masks.prefix(77)}),
    Draw("chunked", {"causal": True, "mask_mod": masks.chunked(96)}),
    Draw("dilated", {"causal": True, "mask_mod": masks.dilated(3)}),
    Draw("strided", {"causal": True, "mask_mod": masks.strided(32)}),
    Draw("by head", {"mask_mod": MASKS["by head"], "score_mod": SCORES["wave"]}),
    Draw("gate", {"causal": "top-left", "score_mod": SCORES["gate"]}),
    Draw("masking", {"score_mod": SCORES["masking"]}),
    Draw("root", {"causal": True, "window": (200, 50), "score_mod": SCORES["root"]}),
    Draw("all", {"causal": True, "window": (150, None), "softcap": 3.0, "score_mod": scores.alibi,
                 "mask_mod": masks.dilated(2)}),
    Draw("nothing", {"mask_mod": MASKS["nothing"], "score_mod": SCORES["root"]}),
]  # fmt: skip


def fails(kernel, head_dim, dtype, lengths, heads=(4, 2)):
    """Sentences on what the kernel gets wrong at some lengths."""
    found = []
    functions = {"causal": kernel.spec.causal, "mask": kernel.spec.mask, "score": kernel.spec.score}
    for seed, (seqlen_q, seqlen_k) in enumerate(lengths):
        sizes = (2, seqlen_q, seqlen_k, *heads, head_dim)
        arrays = support.random_inputs(*sizes, dtype=getattr(torch, dtype), device="cuda", seed=seed)
        sentences = support.failures(attend(kernel), *arrays, **functions)
        found += [f"({seqlen_q}, {seqlen_k}) {sentence}" for sentence in sentences]
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.name)
def test_every_function_forward_and_backward(draw, arch):
    options = {"causal": False, **draw.options}
    report(fails(flashgen.compile(128, arch=arch, **options), 128, "bfloat16", LENGTHS))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("draw", [DRAWS[index] for index in (0, 3, 4, 13)], ids=lambda draw: draw.name)
def test_other_head_dims(draw, head_dim, arch):
    options = {"causal": False, **draw.options}
    kernel = flashgen.compile(head_dim, arch=arch, dtype="float16", **options)
    report(fails(kernel, head_dim, "float16", LENGTHS[:3]))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("draw", [DRAWS[index] for index in (2, 13)], ids=lambda draw: draw.name)
def test_deterministic(draw, arch):
    options = {"causal": False, **draw.options}
    report(fails(flashgen.compile(128, arch=arch, deterministic=True, **options), 128, "bfloat16", LENGTHS))


@pytest.mark.parametrize("draw", [DRAWS[index] for index in (0, 3, 4, 9)], ids=lambda draw: draw.name)
def test_heads_that_share_a_tile(draw):
    """Few queries of many grouped heads: the forward packs them, and every row has its own head and place."""
    options = {"causal": False, **draw.options}
    report(fails(flashgen.compile(128, arch="sm_90a", **options), 128, "bfloat16", ((1, 700), (17, 300)), (16, 2)))


def test_a_score_function_may_raise_scores_far_above_the_guess():
    """Later keys score much higher than earlier ones, by the function and not by the inputs."""

    def rising(score, b, h, q_idx, kv_idx):
        return score + flashgen.where(kv_idx > 150, 90.0, 0.0) + kv_idx // 64 * 10

    report(fails(flashgen.compile(128, False, score_mod=rising), 128, "bfloat16", ((130, 600),)))
