"""Two hundred drawn problems on the GPU, forward and backward, against dense float64 and torch's autograd.

`python tests/draws.py N` prints draw N. They have little in common, and each compiles kernels of its own: -n 6 helps.
"""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import draws  # noqa: E402
from cases import report  # noqa: E402

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)


@pytest.mark.parametrize("number", range(200))
def test_a_draw_is_dense_attention(number):
    """Every fourth on the portable kernels."""
    drawn = draws.numbered(number)
    kernel = drawn.compile(arch="sm_90" if number % 4 == 3 else "sm_90a")
    report(drawn.failures(kernel, "cuda"))
