"""What a call can bring, in random combinations, on the CPU: against dense float64 attention and torch's autograd."""

import pytest

torch = pytest.importorskip("torch")

from combinations import KINDS, Case  # noqa: E402
from test_api_refusals import refused  # noqa: E402

import flashgen  # noqa: E402
from flashgen import masks  # noqa: E402


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_every_combination_is_dense_attention(seed, kind):
    assert not Case(seed, "cpu", 16, kind).failures()


def test_lists_of_blocks_are_not_for_packed_sequences():
    q, k, v = (torch.randn(20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    told = (torch.tensor([0, 5, 20], dtype=torch.int32),) * 2
    blocks = flashgen.block_mask(masks.dilated(3), None, 2, 1, 15, 15, like=q)
    kernel = flashgen.compile(16, False, varlen=True, mask_mod=masks.dilated(3))
    mentions = ["block_mask", "sequences of one length", "leave it out"]
    refused(kernel, q, k, v, *told, block_mask=blocks, mentions=mentions)
    given = {"mask_mod": masks.dilated(3), "block_mask": blocks}
    refused(flashgen.varlen_attention, q, k, v, *told, **given, mentions=mentions)
