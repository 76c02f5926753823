"""Attention problems drawn at random: plain Python for mask and score functions, options, shapes, and the arrays.

A draw is written from a random.Random, so that a number names it (`python tests/draws.py 17` prints number 17), and
hypothesis shrinks it. Its functions are text, which runs twice: on flashgen's stand-ins, and on tensors of torch for
dense attention and its autograd. So neither the tracer nor the derivatives of flashgen have a part in what is expected.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import support
import torch
from expression_grammar import Array, Grammar

import flashgen

ARGUMENTS = {"mask": ("b", "h", "q_idx", "kv_idx"), "score": ("score", "b", "h", "q_idx", "kv_idx")}
# How often each is drawn, of 32.
HEAD_DIMS = {8: 4, 16: 4, 24: 2, 32: 4, 40: 2, 64: 5, 72: 1, 96: 2, 128: 5, 160: 1, 192: 1, 256: 1}


class Sizes(NamedTuple):
    """Of one call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int


@dataclass(frozen=True)
class Function:
    """The text of a mask or score function, and the arrays that it reads."""

    kind: str
    body: str
    arrays: tuple[Array, ...]

    def __str__(self) -> str:
        arguments = (*ARGUMENTS[self.kind], *(item.name for item in self.arrays))
        return f"def {self.kind}_mod({', '.join(arguments)}):\n    return {self.body}\n"

    def over(self, functions: Any) -> Callable:
        """The function over flashgen, or over what has its names for tensors."""
        names: dict[str, Any] = {"fg": functions, "inf": math.inf}
        exec(compile(str(self), f"<drawn {self.kind}_mod>", "exec"), names)
        return names[f"{self.kind}_mod"]


@dataclass(frozen=True)
class Draw:
    """One problem: options of flashgen.compile without functions, sizes, scale, functions by kind, a seed for data."""

    options: dict[str, Any]
    sizes: Sizes
    scale: float | None
    functions: dict[str, Function]
    seed: int = 0
    with_dlse: bool = False

    def __str__(self) -> str:
        lines = [f"{self.options}, {self.sizes}, scale {self.scale}, dlse {self.with_dlse}"]
        for function in self.functions.values():
            lines += [str(function).rstrip(), *(f"    {item}" for item in function.arrays)]
        return "\n".join(lines)

    def compile(self, **more: Any) -> flashgen.Kernel:
        mods = {f"{kind}_mod": function.over(flashgen) for kind, function in self.functions.items()}
        return flashgen.compile(**self.options, **mods, **more)

    def inputs(self, device: str) -> list[torch.Tensor]:
        """q, k, v and dO, BSHD."""
        dims = (self.options["head_dim"], self.options["head_dim_v"])
        dtype = getattr(torch, self.options["dtype"])
        return support.random_inputs(*self.sizes, *dims, dtype=dtype, device=device, seed=self.seed)

    def aux(self, device: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The arrays of each function, by kind."""
        lengths = dict(zip(("b", "q", "k", "h"), self.sizes, strict=False))
        generator = torch.Generator().manual_seed(self.seed)
        return {
            kind: tuple(item.make(lengths, generator).to(device) for item in function.arrays)
            for kind, function in self.functions.items()
        }

    def failures(self, kernel: flashgen.Kernel, device: str) -> list[str]:
        """Sentences on what the kernel gets wrong, forward and backward, by the correctness rule."""
        q, k, v, do = self.inputs(device)
        aux = self.aux(device)
        generator = torch.Generator(device).manual_seed(self.seed)
        rows = (q.shape[0], q.shape[2], q.shape[1])
        dlse = torch.randn(rows, generator=generator, device=device) if self.with_dlse else None
        given = {f"{kind}_aux": arrays for kind, arrays in aux.items() if arrays}
        turned = self.options["layout"] == "bhsd"

        def attend(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            leaves = tuple(x.transpose(1, 2) for x in leaves) if turned else leaves
            o, lse = kernel(*leaves, scale=self.scale, return_lse=True, **given)
            return (o.transpose(1, 2) if turned else o), lse

        result = support.evaluate(attend, q, k, v, do, dlse=dlse)
        ref, low = (self.dense(q, k, v, do, dlse, aux, dtype) for dtype in (torch.float64, q.dtype))
        return support.violations(result, ref, low, q.dtype)

    def dense(self, q, k, v, do, dlse, aux, dtype) -> support.Result:
        """Attention by its definition and torch's autograd, with every matrix stored in `dtype`."""
        scale = 1.0 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        leaves = [x.to(dtype).detach().requires_grad_() for x in (q, k, v)]
        group = q.shape[2] // k.shape[2]
        qh = leaves[0].transpose(1, 2)
        kh, vh = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in leaves[1:])
        s, shown = self._scores((qh * scale) @ kh.mT, aux)
        s = s.masked_fill(~shown, -math.inf)
        empty = (s == -math.inf).all(-1, keepdim=True)
        s = torch.where(empty, 0.0, s)  # softmax of -inf alone is no number, and neither is its derivative
        o = (torch.where(empty, 0.0, torch.softmax(s, -1)) @ vh).transpose(1, 2)
        lse = torch.where(empty[..., 0], -math.inf, torch.logsumexp(s, -1))
        outputs, gradients = [o], [do.to(dtype)]
        if dlse is not None and lse.requires_grad:  # not where a drawn score forgets the score
            outputs, gradients = [o, lse], [do.to(dtype), dlse.to(dtype)]
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, materialize_grads=True)
        return support.Result(o.detach(), lse.detach(), *found)

    def _scores(self, s: torch.Tensor, aux: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores after softcap and the score function, which are computed in fp32 at least, and what is shown."""
        wide = torch.promote_types(s.dtype, torch.float32)
        places = [
            torch.arange(size, device=s.device).reshape(-1, *(1,) * (3 - axis)) for axis, size in enumerate(s.shape)
        ]
        with default_dtype(wide):
            functions = TorchFunctions(*s.shape[1:])
            read = {
                kind: [x.to(wide) if x.is_floating_point() else x.long() for x in arrays]
                for kind, arrays in aux.items()
            }
            x = s.to(wide)
            cap = self.options["softcap"]
            x = x if cap is None else cap * torch.tanh(x / cap)
            if "score" in self.functions:
                x = self.functions["score"].over(functions)(x, *places, *read["score"]).broadcast_to(s.shape)
            shown = self._shown(places, *s.shape[2:])
            if "mask" in self.functions:
                shown = shown & self.functions["mask"].over(functions)(*places, *read["mask"])
        return x.to(s.dtype), shown.broadcast_to(s.shape)

    def _shown(self, places: list[torch.Tensor], seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """What `causal` and `window` show."""
        top_left = self.options["causal"] == "top-left"
        place = places[2] + (0 if top_left else seqlen_k - seqlen_q)
        left, right = self.options["window"] or (None, None)
        shown = places[3] > -1
        shown = shown & (places[3] <= place) if self.options["causal"] else shown
        shown = shown if left is None else shown & (places[3] >= place - left)
        return shown if right is None else shown & (places[3] <= place + right)


class TorchFunctions:
    """flashgen's functions on tensors of torch."""

    def __init__(self, heads: int, seqlen_q: int, seqlen_k: int) -> None:
        self.heads, self.seqlen_q, self.seqlen_k = heads, seqlen_q, seqlen_k

    def __getattr__(self, name: str) -> Callable:
        function = getattr(torch, name)
        return lambda *values: function(*(torch.as_tensor(x) for x in values))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """The type that torch gives quotients of integers, and their products with Python's numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(rng: random.Random, longest: int, head_dims: tuple[int, ...] = tuple(HEAD_DIMS), depth: int = 3) -> Draw:
    """A problem with sequences up to `longest`, and expressions up to `depth` operations deep."""
    dims = [dim for dim in head_dims for _ in range(HEAD_DIMS[dim])]
    head_dim = rng.choice(dims)
    options = {
        "head_dim": head_dim,
        "head_dim_v": head_dim if rng.random() < 0.7 else rng.choice(dims),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "causal": rng.choice([False, True, "top-left"]),
        "window": (side(rng, longest), side(rng, longest)) if rng.random() < 0.3 else None,
        "softcap": round(rng.uniform(1.5, 20.0), 2) if rng.random() < 0.25 else None,
        "layout": rng.choice(["bshd", "bhsd"]),
        "deterministic": rng.random() < 0.25,
    }
    heads_kv, group = rng.randint(1, 2), rng.choice([1, 1, 2, 3])
    sizes = Sizes(rng.randint(1, 2), length(rng, longest), length(rng, longest), heads_kv * group, heads_kv)
    scale = None if rng.random() < 0.6 else round(rng.uniform(0.4, 1.2) / math.sqrt(head_dim), 4)
    kinds = rng.choice([("score",), ("mask",), ("mask", "score"), ("mask", "score")])
    functions = {kind: function(rng, kind, depth) for kind in kinds}
    return Draw(options, sizes, scale, functions, rng.randint(0, 99), rng.random() < 0.25)


def function(rng: random.Random, kind: str, depth: int) -> Function:
    grammar = Grammar(rng, kind)
    body = grammar.score(depth) if kind == "score" else grammar.mask(depth)
    return Function(kind, body, tuple(item for item in grammar.arrays if f"{item.name}[" in body))


def side(rng: random.Random, longest: int) -> int | None:
    return rng.choice([None, 0, rng.randint(0, longest)])


def length(rng: random.Random, longest: int) -> int:
    """1 now and then, whole tiles now and then, and mostly what is neither."""
    return rng.choice([1, 64, *(rng.randint(2, longest) for _ in range(6))])


def numbered(number: int) -> Draw:
    """One of the draws that run on GPUs."""
    return draw(random.Random(number), longest=330, depth=2 + number % 3)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(numbered(int(argument)))
