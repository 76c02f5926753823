"""Attention problems for the interpreters' tests: inputs, the kernels run one after another, dense float64 formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from functions import arrays_of

from flashgen.attention import backward, dropout, forward
from flashgen.interp import reference, tile
from flashgen.interp.common import round_to
from flashgen.runtime import dropping
from flashgen.spec import Spec

# A rounding of each storage type; of float32, whose sums are of float32 too, what these add up to.
UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18, "tf32": 2.0**-10}
DROPPED = (0.25, 2**63 + 5, 2**31 + 1)  # p, seed and offset where a spec drops


@dataclass
class Problem:
    """One call of attention; arrays are (batch, heads, seqlen[, dim]) with the true head dims."""

    spec: Spec
    batches: int = 1
    heads: int = 1
    heads_kv: int = 1
    seqlen_q: int = 8
    seqlen_k: int = 8
    seed: int = 0
    scale: float = 0.0
    given: dict | None = None  # the arrays that functions read, by name; None for those of tests/functions.py
    arrays: dict = field(init=False)
    aux: dict = field(init=False)  # those that functions read, which are among the arrays

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        d, dv = self.spec.head_dim, self.spec.head_dim_v
        queries, keys = (self.batches, self.heads, self.seqlen_q), (self.batches, self.heads_kv, self.seqlen_k)
        shapes = {"q": (*queries, d), "k": (*keys, d), "v": (*keys, dv), "dout": (*queries, dv)}
        self.arrays = {name: round_to(self.spec.dtype, rng.standard_normal(s)) for name, s in shapes.items()}
        sizes = (self.batches, self.heads, self.seqlen_q, self.seqlen_k)
        self.aux = arrays_of(self.spec, *sizes, self.seed) if self.given is None else self.given
        self.arrays |= self.aux
        if self.spec.sinks:
            self.arrays["sinks"] = round_to(self.spec.sinks, sinks_of(self.heads))
        self.arrays["dlse"] = rng.standard_normal(queries).astype(np.float32)
        self.scale = self.scale or 1.0 / math.sqrt(d)

    @property
    def scalars(self):
        return {
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "heads": self.heads,
            "heads_kv": self.heads_kv,
            "group": self.heads // self.heads_kv,
            "batches": self.batches,
            "scale": self.scale,
            "scale_log2": self.scale * math.log2(math.e),
        } | (dropout.values(*DROPPED) if self.spec.dropout else {})

    def dims(self, block_q=8, block_kv=8, multiple=8):
        def padded(dim):
            return -(-dim // multiple) * multiple

        return {
            "block_q": block_q,
            "block_kv": block_kv,
            "head_dim": padded(self.spec.head_dim),
            "head_dim_v": padded(self.spec.head_dim_v),
        }

    def outputs(self, dims):
        """Every output and workspace, poisoned."""
        queries, keys = (self.batches, self.heads, self.seqlen_q), (self.batches, self.heads_kv, self.seqlen_k)
        padded_q = -(-self.seqlen_q // dims["block_q"]) * dims["block_q"]
        d, dv = self.spec.head_dim, self.spec.head_dim_v
        rows = (self.batches, self.heads, padded_q)
        shapes = {"o": (*queries, dv), "lse": queries, "delta": rows, "lse_log2": rows, "dq": (*queries, d)}
        shapes |= {"dk": (*keys, d), "dv": (*keys, dv)}
        shapes["dq_workspace"] = (*rows, dims["head_dim"])
        shapes["sink_sums"] = (1, self.heads, self.batches * -(-self.seqlen_q // dims["block_kv"]))
        shapes["dsinks"] = (1, 1, self.heads)
        return {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}

    def kernels(self):
        """The launches of a forward and a backward, in order."""
        spec = self.spec
        first = [forward.forward(spec), backward.delta(spec), backward.backward(spec)]
        return [*first, backward.backward_dq(spec) if spec.deterministic else backward.convert_dq(spec)]

    def run_tile(self, block_q=8, block_kv=8, multiple=8, listener=None, kernels=None):
        dims = self.dims(block_q, block_kv, multiple)
        arrays = {**self.arrays, **self.outputs(dims)}
        for kernel in kernels or self.kernels():
            tile.run(kernel, dims, arrays, self.scalars, listener)
        return arrays

    def options(self):
        """What the dense formulas take beside q, k, v, dout and dlse."""
        options = {name: getattr(self.spec, name) for name in ("causal", "mask", "score")} | {"scale": self.scale}
        options |= {"aux": self.aux, "sinks": self.arrays.get("sinks")}
        if self.spec.dropout:
            p, seed, offset = DROPPED
            sizes = (self.batches, self.heads, self.seqlen_q, self.seqlen_k)
            options |= {"keep": dropping.mask(seed, offset, p, *sizes), "dropout_p": p}
        return options

    def dense(self):
        """Dense float64: o, lse, dq, dk, dv."""
        q, k, v, dout = (self.arrays[name].transpose(0, 2, 1, 3) for name in ("q", "k", "v", "dout"))
        options = self.options()
        o, lse = reference.forward(q, k, v, **options)
        dq, dk, dv, *dsinks = reference.backward(q, k, v, dout, self.arrays["dlse"], **options)
        found = {"o": o, "dq": dq, "dk": dk, "dv": dv}
        more = {"lse": lse} | ({"dsinks": dsinks[0].reshape(1, 1, -1)} if dsinks else {})
        return {name: x.transpose(0, 2, 1, 3) for name, x in found.items()} | more


def sinks_of(heads):
    """Sinks among the scores, far above and far below them, and none at all."""
    return np.resize(np.array([0.5, 30.0, -np.inf, -200.0], np.float32), heads)


def assert_close(arrays, expected, dtype, names=("o", "lse", "dq", "dk", "dv")):
    """Within a few roundings of the storage type of the largest value; where float64 is infinite, exactly that."""
    unit = UNITS[dtype.name]
    of_lse = unit if dtype.name == "tf32" else 1e-5
    for name in names:
        x, ref = arrays[name], expected[name]
        assert x.shape == ref.shape, name
        finite = np.isfinite(ref)
        np.testing.assert_array_equal(x[~finite], ref[~finite], err_msg=name)
        bound = (3 * unit if name != "lse" else of_lse) * (1 + np.abs(ref[finite]).max(initial=0.0))
        worst = np.abs(x[finite] - ref[finite]).max(initial=0.0)
        assert worst <= bound, f"{name}: {worst} > {bound}"
