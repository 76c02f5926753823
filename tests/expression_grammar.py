"""A grammar of mask and score functions, as text of plain Python with flashgen's functions under the name `fg`.

Numbers are drawn with a bound on their size and on the error of computing them in float32, and scaled down where either
grows: what is compared is then attention, and not the conditioning of the expression. Where a comparison of numbers
decides, its threshold is no value that the other side takes; where a score decides, both branches meet.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

DTYPES = ("float32", "float32", "bfloat16", "float16")
INDICES = {"b": "b", "h": "h", "q_idx": "q", "kv_idx": "k"}
SMALL = (1, 2, 3, 5, 8)  # lengths of axes that are indexed with %
LARGEST_SIZE = 12.0
LARGEST_ERROR = 60.0  # times 2^-22: 1.4e-5, of the 5e-5 that an LSE may be wrong
WORDS = ("t", "u", "w")


@dataclass(frozen=True)
class Array:
    """An array that a function reads: for each axis b, h, q or k or a number, its type, and how it lies in memory."""

    name: str
    axes: tuple[str | int, ...]
    dtype: str
    form: str  # "plain", "turned" (axes in memory the other way round), "gaps", "expanded" (the first axis)

    def make(self, lengths: dict[str, int], generator: torch.Generator) -> torch.Tensor:
        """Integers from 0 to 7, or numbers between -3 and 3."""
        shape = [lengths[axis] if isinstance(axis, str) else axis for axis in self.axes]
        stored = list(shape)
        if self.form == "turned":
            stored.reverse()
        elif self.form == "gaps":
            stored[-1] *= 2
        elif self.form == "expanded":
            stored[0] = 1
        if self.dtype == "int32":
            values = torch.randint(0, 8, stored, generator=generator, dtype=torch.int32)
        else:
            values = torch.randn(stored, generator=generator).clamp(-3, 3).to(getattr(torch, self.dtype))
        if self.form == "turned":
            return values.permute(*reversed(range(len(shape))))
        return values[..., ::2] if self.form == "gaps" else values.expand(shape)


class Number(NamedTuple):
    """Text, the largest absolute value, and the error of float32 in units of 2^-22."""

    text: str
    size: float
    error: float


class Grammar:
    """Writes one function. `arrays` are those that it has come to read."""

    def __init__(self, rng: random.Random, kind: str) -> None:
        self.rng = rng
        self.kind = kind
        self.arrays: list[Array] = []

    def mask(self, depth: int) -> str:
        return self.truth(depth)

    def score(self, depth: int) -> str:
        """Mostly the score changed by something; at times anything; at times with keys that get -inf."""
        change = self.number(depth, scored=self.rng.random() < 0.6)
        form = self.rng.choice(["+", "*", "any", "+", "-inf"])
        if form == "any":
            found = self.number(depth, scored=True)
        elif form == "*":
            found = self.damped(self.times(Number("score", 8.0, 4.0), self.added("+", change, Number("1.5", 1.5, 0.0))))
        else:
            found = self.damped(self.added(self.rng.choice("+-"), Number("score", 8.0, 4.0), change))
        return f"fg.where({self.truth(1)}, {found.text}, -inf)" if form == "-inf" else found.text

    def number(self, depth: int, scored: bool) -> Number:
        """A number; where `scored` it may depend on the score."""
        if depth == 0:
            return self.rng.choice([self._index_number, self._load_number, self._score if scored else self._constant])()
        form = self.rng.choice([self._unary, self._unary, self._binary, self._binary, self._choice])
        return self.damped(form(depth - 1, scored))

    def damped(self, x: Number) -> Number:
        """x, or so much less of it that its size and error stay below their limits."""
        factor = min(LARGEST_SIZE / max(x.size, 1e-9), LARGEST_ERROR / max(x.error, 1e-9))
        if factor >= 1.0:
            return x
        factor = float(f"{0.7 * factor:.2g}")
        return Number(f"{factor} * ({x.text})", factor * x.size, factor * x.error + factor * x.size / 4)

    def _constant(self) -> Number:
        value = round(self.rng.uniform(-3.0, 3.0), 2)
        return Number(f"({value})", abs(value), abs(value) / 4)

    def _score(self) -> Number:
        return Number("score", 8.0, 4.0)

    def _index_number(self) -> Number:
        """A multiple of an integer, or a quotient of it; lengths are a few hundred."""
        whole = self.whole(1)
        if self.rng.random() < 0.5:
            return Number(f"{self.rng.choice([0.01, 0.004, -0.02])} * ({whole})", 10.0, 3.0)
        return Number(f"({whole}) / {self.rng.choice([64, 37, 100.0, 71.5])}", 10.0, 3.0)

    def _load_number(self) -> Number:
        return Number(self.load("number"), 3.0, 0.0)

    def _unary(self, depth: int, scored: bool) -> Number:
        x = self.number(depth, scored)
        size, error = x.size, x.error
        found = {
            "tanh": Number(f"fg.tanh({x.text})", 1.0, error + 8.0),
            "sigmoid": Number(f"fg.sigmoid({x.text})", 1.0, error / 4 + 4.0),
            "sin": Number(f"fg.sin({x.text})", 1.0, error + 5.0),
            "cos": Number(f"fg.cos({x.text})", 1.0, error + 5.0),
            "abs": Number(f"{self.rng.choice(['abs', 'fg.abs'])}({x.text})", size, error),
            "exp": Number(f"fg.exp(fg.minimum({x.text}, 1.0))", math.e, math.e * (error + size / 2 + 1.0)),
            "log": Number(f"fg.log(1.0 + abs({x.text}))", math.log1p(size), error + 2.0),
            "sqrt": Number(f"fg.sqrt(0.5 + abs({x.text}))", math.sqrt(size + 0.5), 0.71 * error + 1.0),
        }
        return self.rng.choice(list(found.values()))

    def _binary(self, depth: int, scored: bool) -> Number:
        x, y = self.number(depth, scored), self.number(depth, scored)
        op = self.rng.choice(["+", "-", "*", "/", "minimum", "maximum"])
        if op == "/":
            error = x.error / 1.5 + y.error * x.size / 2.25 + x.size
            return Number(f"({x.text}) / (1.5 + abs({y.text}))", x.size / 1.5, error)
        if op == "*":
            return self.times(x, y)
        if op in "+-":
            return self.added(op, x, y)
        return Number(f"fg.{op}({x.text}, {y.text})", max(x.size, y.size), max(x.error, y.error))

    def added(self, op: str, x: Number, y: Number) -> Number:
        size = x.size + y.size
        return Number(f"({x.text} {op} ({y.text}))", size, x.error + y.error + size / 4)

    def times(self, x: Number, y: Number) -> Number:
        size = x.size * y.size
        return Number(f"({x.text}) * ({y.text})", size, x.error * y.size + y.error * x.size + size / 4)

    def _choice(self, depth: int, scored: bool) -> Number:
        """By what is exact; or by the score itself, where a slope changes and nothing jumps."""
        x = self.number(depth, scored)
        if scored and self.rng.random() < 0.3:
            at, slope = round(self.rng.uniform(-1.0, 1.0), 3), self.rng.choice([0.25, 2.0, 0.0])
            bent = f"fg.where(score {self.rng.choice(['<', '>='])} {at}, {slope} * (score - {at}), score - {at})"
            return self.added("+", x, Number(bent, 18.0, 9.0))
        y = self.number(depth, scored)
        return Number(f"fg.where({self.truth(1)}, {x.text}, {y.text})", max(x.size, y.size), max(x.error, y.error))

    def truth(self, depth: int) -> str:
        if depth > 0:
            form = self.rng.choice(["&", "|", "|", "~", "where", "compare"])
            if form in "&|":
                return f"({self.truth(depth - 1)} {form} {self.truth(depth - 1)})"
            if form == "~":
                return f"~({self.truth(depth - 1)})"
            if form == "where":
                return f"fg.where({self.truth(0)}, {self.truth(depth - 1)}, {self.truth(depth - 1)})"
        form = self.rng.choice(["numbers", "band", "band", "any", "any", "any"])
        if form == "numbers":
            return self._compared_numbers()
        if form == "band":
            return f"(q_idx - kv_idx {self.rng.choice(['<', '>='])} {self.rng.randint(-90, 90)})"
        relation = self.rng.choice(["<", "<=", ">", ">=", "<", ">=", "==", "!="])
        whole = self.whole(min(depth + 1, 2))
        if relation in ("==", "!="):
            return f"({whole} % {self.rng.choice([2, 3, 4])} {relation} {self.rng.randint(0, 1)})"
        return f"({whole} {relation} {self.whole(1)})"

    def _compared_numbers(self) -> str:
        """Thresholds end in 371 behind the decimals that multiples of integers and quotients of small ones have."""
        x = self.rng.choice([self._index_number, self._load_number])()
        threshold = round(self.rng.uniform(-1.5, 1.5), 2) + 0.00371
        return f"({x.text} {self.rng.choice(['<', '>'])} {threshold:.5f})"

    def whole(self, depth: int) -> str:
        """An integer that depends on an index."""
        if depth == 0:
            return self.rng.choice([*INDICES, "q_idx", "kv_idx", "kv_idx"])
        x = self.whole(depth - 1)
        other = self.rng.choice([self.whole(0), "fg.seqlen_q", "fg.seqlen_k", "fg.heads", str(self.rng.randint(1, 90))])
        form = self.rng.choice(["+", "-", "-", "*", "//", "%", "% heads", "abs", "pick", "where", "load"])
        if form in ("+", "-"):
            return f"({x} {form} {other})"
        if form in ("*", "//", "%"):
            return f"({x} {form} {self.rng.randint(2, 3 if form == '*' else 40)})"
        if form == "% heads":
            return f"({x} % fg.heads)"
        if form == "abs":
            return f"abs({x} - {other})"
        if form == "pick":
            return f"fg.{self.rng.choice(['minimum', 'maximum'])}({x}, {other})"
        if form == "where":
            return f"fg.where({self.whole(0)} < {self.rng.randint(1, 90)}, {x}, {other})"
        return self.load("integer")

    def load(self, what: str) -> str:
        """An element of an array, of one to three indices: an axis as long as what it is indexed by, or any with %."""
        known = [item for item in self.arrays if (item.dtype == "int32") == (what == "integer")]
        if known and (len(self.arrays) == len(WORDS) or self.rng.random() < 0.4):
            array = self.rng.choice(known)
        elif len(self.arrays) < len(WORDS):
            axes = tuple(self.rng.choice(["b", "h", "q", "k", *SMALL]) for _ in range(self.rng.randint(1, 3)))
            dtype = "int32" if what == "integer" else self.rng.choice(DTYPES)
            form = self.rng.choice(["plain", "turned", "gaps", "expanded"])
            array = Array(WORDS[len(self.arrays)], axes, dtype, form)
            self.arrays.append(array)
        else:
            return "kv_idx" if what == "integer" else "0.01 * q_idx"
        return f"{array.name}[{', '.join(self._index(axis) for axis in array.axes)}]"

    def _index(self, axis: str | int) -> str:
        if isinstance(axis, str):
            return next(name for name, letter in INDICES.items() if letter == axis)
        whole = self.whole(0)
        if self.rng.random() < 0.3:
            whole = self.rng.choice([f"({whole} - kv_idx)", f"{whole} // 7", *self._loaded_wholes()])
        return f"{whole} % {axis}"

    def _loaded_wholes(self) -> list[str]:
        """Integers loaded from arrays that are there already and take plain indices alone."""
        plain = [item for item in self.arrays if item.dtype == "int32" and not any(type(a) is int for a in item.axes)]
        return [f"{item.name}[{', '.join(self._index(axis) for axis in item.axes)}]" for item in plain]
