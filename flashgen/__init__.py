"""flashgen: a generator of specialised exact-attention kernels.

o = flashgen.attention(q, k, v, causal=True)
kernel = flashgen.compile(head_dim=128, causal=True); print(kernel.explain()); o = kernel(q, k, v)
"""

# The package of the loop nests, before the function of the same name: imported later, it would take that name.
import flashgen.attention  # noqa: F401 # isort: skip
from flashgen import masks, scores
from flashgen.api import Kernel, attention, compile
from flashgen.blocks import block_mask
from flashgen.spec import Spec
from flashgen.trace.functions import (
    abs,
    cos,
    exp,
    exp2,
    heads,
    log,
    maximum,
    minimum,
    seqlen_k,
    seqlen_q,
    sigmoid,
    sin,
    sqrt,
    tanh,
    where,
)

__version__ = "0.1.0"
__all__ = [
    "Kernel",
    "Spec",
    "abs",
    "attention",
    "block_mask",
    "compile",
    "cos",
    "exp",
    "exp2",
    "heads",
    "log",
    "masks",
    "maximum",
    "minimum",
    "scores",
    "seqlen_k",
    "seqlen_q",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
    "where",
]
