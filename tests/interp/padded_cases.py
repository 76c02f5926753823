"""Padded batches for the interpreters' tests: like attention_cases.Problem, of whose keys only some are used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_cases import DROPPED, Problem

from flashgen.interp import reference
from flashgen.runtime import dropping


@dataclass
class Padded(Problem):
    """used: how many keys of each batch are used; the others are NaN."""

    used: tuple[int, ...] = ()

    def __post_init__(self):
        self.batches = len(self.used)
        super().__post_init__()
        self.arrays["seqused_k"] = np.array(self.used, np.int32)
        for number, used in enumerate(self.used):
            for name in ("k", "v"):
                self.arrays[name][number, :, used:] = np.nan

    @property
    def scalars(self):
        return super().scalars | {"length_k": self.seqlen_k, "k_batch_rows": 0, "v_batch_rows": 0}

    def dense(self):
        """Dense float64 of each batch with its own keys, put together; zero gradients of the others."""
        every = [self._dense(number) for number in range(self.batches)]
        found = {name: np.concatenate([one[name] for one in every]) for name in every[0] if name != "dsinks"}
        return found | ({"dsinks": sum(one["dsinks"] for one in every)} if self.spec.sinks else {})

    def _dense(self, number):
        used, own = self.used[number], slice(number, number + 1)
        part = {name: self.arrays[name][own].transpose(0, 2, 1, 3) for name in ("q", "k", "v", "dout")}
        q, k, v, dout = part["q"], part["k"][:, :used], part["v"][:, :used], part["dout"]
        options = {name: getattr(self.spec, name) for name in ("causal", "mask", "score")} | {"scale": self.scale}
        options |= {"aux": self.aux, "first_batch": number, "sinks": self.arrays.get("sinks")}
        if self.spec.dropout:
            p, seed, offset = DROPPED
            sizes = (self.batches, self.heads, self.seqlen_q, self.seqlen_k)
            options |= {"keep": dropping.mask(seed, offset, p, *sizes)[own, :, :, :used], "dropout_p": p}
        o, lse = reference.forward(q, k, v, **options)
        dq, dk, dv, *dsinks = reference.backward(q, k, v, dout, self.arrays["dlse"][own], **options)
        rest = [(0, 0), (0, self.seqlen_k - used), (0, 0), (0, 0)]
        found = {"o": o, "dq": dq, "dk": np.pad(dk, rest), "dv": np.pad(dv, rest)}
        more = {"lse": lse} | ({"dsinks": dsinks[0].reshape(1, 1, -1)} if dsinks else {})
        return {name: x.transpose(0, 2, 1, 3) for name, x in found.items()} | more
