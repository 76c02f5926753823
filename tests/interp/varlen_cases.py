"""Packed sequences for the interpreters' tests: like attention_cases.Problem, with dense attention for each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from attention_cases import DROPPED, Problem
from functions import arrays_of

from flashgen.interp import reference
from flashgen.runtime import dropping

QUERIES, KEYS = ("q", "dout", "o", "dq"), ("k", "v", "dk", "dv")


@dataclass
class Sequences(Problem):
    """Sequences of so many queries and keys; arrays are (1, heads, total[, dim]).

    used: how many keys of each are used, where the spec says so; the others are NaN. foreign: sequences of NaN alone.
    """

    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()
    padding: int = 8

    def __post_init__(self):
        self.seqlen_q, self.seqlen_k = sum(self.queries), sum(self.keys)
        self.batches = 1
        super().__post_init__()
        count = len(self.queries)
        longest = max(self.queries, default=0), max(self.keys, default=0)
        self.arrays = {name: array for name, array in self.arrays.items() if name not in self.aux}
        self.aux = arrays_of(self.spec, max(count, 1), self.heads, *longest, self.seed)
        self.arrays |= self.aux
        self.arrays["cu_seqlens_q"] = np.cumsum([0, *self.queries]).astype(np.int32)
        self.arrays["cu_seqlens_k"] = np.cumsum([0, *self.keys]).astype(np.int32)
        if self.spec.used:
            self.arrays["seqused_k"] = np.array(self.used, np.int32)
        for number in self.foreign:
            for name in ("q", "k", "v", "dout"):
                self.of(self.arrays, name, number)[...] = np.nan
        for number, used in enumerate(self.used):
            for name in ("k", "v"):
                self.of(self.arrays, name, number)[:, used:] = np.nan

    @property
    def scalars(self):
        sizes = {"total_q": self.seqlen_q, "total_k": self.seqlen_k, "batches": len(self.queries), "one": 1}
        return super().scalars | sizes | {"padding": self.padding}

    def of(self, arrays, name, number):
        """The part of an array that belongs to a sequence: (heads, rows[, dim])."""
        offsets = self.arrays["cu_seqlens_k" if name in KEYS else "cu_seqlens_q"]
        return arrays[name][0, :, offsets[number] : offsets[number + 1]]

    def outputs(self, dims):
        found = super().outputs(dims)
        self.padding = dims["block_q"]
        rows = (self.seqlen_q // self.padding + len(self.queries)) * self.padding
        found["sink_sums"] = np.full((1, self.heads, -(-rows // dims["block_kv"])), np.nan, np.float32)
        for name in ("delta", "lse_log2", "dq_workspace"):
            found[name] = np.full((1, self.heads, rows, *found[name].shape[3:]), np.nan, np.float32)
        return found

    def dense(self):
        """Dense float64 of each sequence by itself, put together; of foreign ones, nothing."""
        found = {
            name: np.full_like(array, np.nan, dtype=np.float64)
            for name, array in super().outputs(self.dims()).items()
            if name in ("o", "lse", "dq", "dk", "dv")
        }
        for number in set(range(len(self.queries))) - set(self.foreign):
            for name, array in self._dense(number).items():
                if name == "dsinks":
                    found[name] = found.get(name, 0.0) + array
                else:
                    self.of(found, name, number)[...] = array
        return found

    def alone(self, number):
        """q, k, v, dout and dlse of a sequence, as the dense formulas take them, and what these take beside."""
        used = self.used[number] if self.spec.used else self.keys[number]
        part = {name: self.of(self.arrays, name, number) for name in ("q", "k", "v", "dout", "dlse")}
        part |= {name: part[name][:, :used] for name in ("k", "v")}
        tiles = (part[name].transpose(1, 0, 2)[None] for name in ("q", "k", "v", "dout"))
        options = self.options() | {"first_batch": number}
        if self.spec.dropout:
            p, seed, offset = DROPPED
            sizes = (len(self.queries), self.heads, max(self.queries), max(self.keys))  # as of a padded batch
            keep = dropping.mask(seed, offset, p, *sizes)[number, :, : self.queries[number], :used]
            options |= {"keep": keep[None], "dropout_p": p}
        return (*tiles, part["dlse"][None]), options

    def _dense(self, number):
        used = self.used[number] if self.spec.used else self.keys[number]
        (q, k, v, dout, dlse), options = self.alone(number)
        o, lse = reference.forward(q, k, v, **options)
        dq, dk, dv, *dsinks = reference.backward(q, k, v, dout, dlse, **options)
        rest = [(0, self.keys[number] - used), (0, 0), (0, 0)]
        gradients = {"dk": np.pad(dk[0], rest), "dv": np.pad(dv[0], rest), "dq": dq[0], "o": o[0]}
        more = {"lse": lse[0]} | ({"dsinks": dsinks[0].reshape(1, 1, -1)} if dsinks else {})
        return {name: x.transpose(1, 0, 2) for name, x in gradients.items()} | more


def assert_close(problem, arrays, expected, names=("o", "lse", "dq", "dk", "dv")):
    """Each sequence that is not foreign within a few roundings of the storage type."""
    unit = 2.0**-8 if problem.spec.dtype.name == "bfloat16" else 2.0**-11
    for number in set(range(len(problem.queries))) - set(problem.foreign):
        for name in names:
            x, ref = problem.of(arrays, name, number), problem.of(expected, name, number)
            finite = np.isfinite(ref)
            np.testing.assert_array_equal(x[~finite], ref[~finite], err_msg=f"{name} of {number}")
            bound = (3 * unit if name != "lse" else 1e-5) * (1 + np.abs(ref[finite]).max(initial=0.0))
            worst = np.abs(x[finite] - ref[finite]).max(initial=0.0)
            assert worst <= bound, f"{name} of {number}: {worst} > {bound}"
