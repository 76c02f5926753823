"""flashgen: a generator of specialised exact-attention kernels.

o = flashgen.attention(q, k, v, causal=True)
kernel = flashgen.compile(head_dim=128, causal=True); print(kernel.explain()); o = kernel(q, k, v)
"""

from flashgen.api import Kernel, attention, compile
from flashgen.spec import Spec

__version__ = "0.1.0"
__all__ = ["Kernel", "Spec", "attention", "compile"]
