"""flashgen: a generator of specialised exact-attention kernels.

o = flashgen.attention(q, k, v, causal=True)
kernel = flashgen.compile(head_dim=128, causal=True); print(kernel.explain()); o = kernel(q, k, v)
"""

# The package of the loop nests, before the function of the same name: imported later, it would take that name.
import flashgen.attention  # noqa: F401 # isort: skip
from flashgen.api import Kernel, attention, compile
from flashgen.spec import Spec

__version__ = "0.1.0"
__all__ = ["Kernel", "Spec", "attention", "compile"]
