"""What a call can bring, in random combinations, on the GPU: against dense float64 attention and torch's autograd."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from cases import report  # noqa: E402
from combinations import Case  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize(("arch", "seeds"), [("sm_90a", range(10)), ("sm_90", range(10, 14))], ids=["sm_90a", "sm_90"])
def test_every_combination_is_dense_attention(arch, seeds):
    report([sentence for seed in seeds for sentence in Case(seed, "cuda", 64, arch=arch).failures()])
