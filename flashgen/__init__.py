"""flashgen: a generator of specialised exact-attention kernels.

o = flashgen.attention(q, k, v, causal=True)
kernel = flashgen.compile(head_dim=128, causal=True); print(kernel.explain()); o = kernel(q, k, v)
"""

# The package of the loop nests, before the function of the same name: imported later, it would take that name.
import flashgen.attention  # noqa: F401 # isort: skip
from flashgen import masks, scores
from flashgen.api import Kernel, VarlenKernel, attention, compile, varlen_attention
from flashgen.blocks import block_mask
from flashgen.runtime.dropping import mask as dropout_mask
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
    "VarlenKernel",
    "abs",
    "attention",
    "block_mask",
    "compile",
    "cos",
    "dropout_mask",
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
    "varlen_attention",
    "where",
]
