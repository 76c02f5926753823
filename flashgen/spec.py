"""What is asked for: the specification of an attention problem, the identity of everything that is compiled."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

from flashgen.ir.dtype import BF16, F64, FP32, PRECISIONS, STORAGE, DType
from flashgen.ir.expr import Expr

MAX_HEAD_DIM = {"head_dim": 576, "head_dim_v": 512}
MAX_BACKWARD = 256  # of either, where there is a backward
MAX_PACKED = 64
LENGTHS = ("", "short", "long")


@dataclass(frozen=True)
class Array:
    """An array that a mask or score function reads: its name in the kernels, how many indices it takes, its type."""

    name: str
    rank: int
    dtype: DType


@dataclass(frozen=True)
class Function:
    """A traced mask or score function: the name that it has in files, and its canonical text, which is its identity.

    expr: over the variables b, h, q_idx, kv_idx and the sizes seqlen_q, seqlen_k, heads; of a score function over score
    too. It is not compared, since trees may be equal that differ in type: 1 and 1.0.
    arrays: what its Loads read, in the order of the function's last arguments.
    """

    name: str
    text: str
    expr: Expr = field(compare=False, repr=False)
    arrays: tuple[Array, ...] = ()

    def __hash__(self) -> int:  # asked of each call with a block mask; a text keeps its own
        return hash(self.text)


@dataclass(frozen=True)
class Spec:
    """One exact-attention problem up to its run-time sizes.

    head_dim, head_dim_v: of query and key, and of value; multiples of 8 from 8 to 576 and to 512. Over 256 there is a
        forward alone.
    dtype: storage type of q, k, v and o; accumulation is float32. Of float32 it says too what products are: FP32 is
        three of TF32, TF32 one. F64 is of the interpreter alone, which then computes all in float64.
    causal: bottom-right aligned, query i sees keys up to i + seqlen_k - seqlen_q.
    deterministic: the backward repeats bit for bit.
    aligned: rows of all inputs start on 16-byte boundaries, so that tiles are copied 16 bytes at a time.
    packed: query heads of one key head that share a tile of queries in the forward; a power of two that divides the
        group, up to 64. Only Hopper's forward packs, the others take it for 1.
    length: "short" or "long" for a tile that was measured to suit few or many keys (plan/tuned.py), "" for the usual
        one. Every kernel is right for every length.
    mask: which keys a query sees, among those that `causal` shows it; None for all of them.
    score: what takes the place of each scaled score; None for the score itself.
    varlen: sequences of different lengths are packed one behind the other, as cu_seqlens_q and cu_seqlens_k say.
    used: of the keys of each batch, or packed sequence, only the first seqused_k[b] are used.
    dropout: probabilities are dropped at random; with which probability, and from which seed, is said by each call.
    sinks: the type of the array with a logit for each head that takes part in the denominators; None without.
    listed: loops over blocks walk lists that a call brings (flashgen.block_mask), not all blocks between limits.
    shared_kv: values are the first head_dim_v columns of the keys, and are read from the keys' tile; a forward alone.
    tiled: arrays that the score function reads by [.., q_idx, kv_idx] lie so that TMA copies tiles of them
        (attention/tiles.py); only Hopper's kernels heed it.
    """

    head_dim: int = 128
    head_dim_v: int = 128
    dtype: DType = BF16
    causal: bool = False
    deterministic: bool = False
    aligned: bool = True
    packed: int = 1
    length: str = ""
    mask: Function | None = None
    score: Function | None = None
    varlen: bool = False
    used: bool = False
    sinks: DType | None = None
    dropout: bool = False
    listed: bool = False
    shared_kv: bool = False
    tiled: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v"):
            most = MAX_HEAD_DIM[name]
            value = parse_integer(name, getattr(self, name), f"use a multiple of 8 from 8 to {most}")
            object.__setattr__(self, name, value)
            if value < 8 or value > most or value % 8:
                raise ValueError(f"{name} = {value} must be a multiple of 8 from 8 to {most}; pad the last axis")
        if self.shared_kv and self.head_dim_v > self.head_dim:
            sizes = f"head_dim_v = {self.head_dim_v} exceeds head_dim = {self.head_dim}"
            raise ValueError(f"{sizes}, of which values are the first columns with shared_kv; give v its own array")
        if self.packed not in (1, 2, 4, 8, 16, 32, MAX_PACKED):
            raise ValueError(f"packed = {self.packed} must be a power of two up to {MAX_PACKED}")
        if self.length not in LENGTHS:
            raise ValueError(f"length = {self.length!r} must be one of {LENGTHS}")

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What the functions read: the arrays of the mask, then those of the score function."""
        return tuple(array for function in (self.mask, self.score) if function for array in function.arrays)

    @property
    def differentiable(self) -> bool:
        """True where there is a backward."""
        return max(self.head_dim, self.head_dim_v) <= MAX_BACKWARD and not self.shared_kv

    def check_differentiable(self) -> None:
        """ValueError where there is no backward."""
        if self.shared_kv:
            raise ValueError("a kernel with shared_kv has no backward; give k and v to one without, or detach q and k")
        if not self.differentiable:
            name = max(MAX_HEAD_DIM, key=lambda name: (getattr(self, name), name))
            raise ValueError(
                f"{name} = {getattr(self, name)} has no backward, which goes up to {MAX_BACKWARD}; detach q, k and v, "
                "or call under torch.no_grad()"
            )

    def forward(self) -> Spec:
        """The part that the forward depends on: specs that differ only in the backward share its kernel."""
        return replace(self, deterministic=False)

    def __str__(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        flags = ["causal"] * self.causal + [function.name for function in (self.mask, self.score) if function]
        flags += ["varlen"] * self.varlen + ["used"] * self.used
        flags += ["dropout"] * self.dropout
        flags += [f"sinks_{self.sinks.cuda}"] if self.sinks else []
        flags += ["deterministic"] * self.deterministic
        flags += [] if self.aligned else ["unaligned"]
        flags += [f"packed{self.packed}"] if self.packed > 1 else []
        flags += [self.length] if self.length else []
        flags += ["listed"] if self.listed else []
        flags += ["sharedkv"] if self.shared_kv else []
        flags += ["tiled"] if self.tiled else []
        return "_".join([dims, self.dtype.cuda, *flags])


def parse_integer(name: str, value: Any, instead: str) -> int:
    """An int from a Python or NumPy integer, or from what else counts as an index; TypeError for a bool too.

    instead: what the message tells to do.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} = {value!r} is not an integer; {instead}")


def parse_dtype(dtype: Any, precision: Any = None) -> DType:
    """A DType from "bfloat16", "float16", "float32", "float64", a torch or NumPy dtype, NumPy's class of that name.

    precision: of products of float32, "3xtf32" or "tf32"; "3xtf32" where None.
    """
    found = _storage(dtype)
    if precision is None:
        return found
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r:.40} is not known; use '3xtf32' or 'tf32'")
    if found != FP32:
        raise ValueError(f"precision = {precision!r} is of dtype 'float32' alone; leave it out for {found}")
    return PRECISIONS[precision]


def check_kernels(spec: Spec) -> None:
    """ValueError for a type that the interpreter alone computes with."""
    if spec.dtype == F64:
        raise ValueError("dtype = 'float64' has no kernels for a GPU, only the interpreter's; use 'float32' there")


def interpreted(spec: Spec) -> Spec:
    """The spec whose loop nests and tiles the interpreter runs."""
    return replace(spec, dtype=FP32) if spec.dtype == F64 else spec


def _storage(dtype: Any) -> DType:
    name = dtype.__name__ if isinstance(dtype, type) else str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name in STORAGE:
        return STORAGE[name]
    raise ValueError(
        f"dtype = {dtype!r} is not supported; use 'bfloat16', 'float16', 'float32' or on the interpreter 'float64', or "
        "a torch or NumPy dtype of these"
    )
