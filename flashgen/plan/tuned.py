"""Measured choices that override the cost model, each with the card, the date, the figure and the command.

`python -m flashgen tune` prints the lines; tests/unit/test_plan_tuned.py fails for one that no candidate fits.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashgen.plan.arch import Arch
from flashgen.plan.plan import Candidate
from flashgen.spec import Function, Spec

WIDTH = 100  # of a command in a line
LISTED = "listed"  # the kind of any mask whose blocks are listed
NARROW = 2048  # keys of a window up to which tiles of few rows pay, as they do for so many keys of a causal mask
Key = tuple[str, str, int, int, bool, str, str]


@dataclass(frozen=True)
class Measured:
    """The choice of one candidate, by all that tells candidates apart.

    stages: the depth of every staged buffer, in the candidate's order. split: warps along the columns of the scores.
    traits, resident: the candidate's. limit: of a line for short sequences the most keys that it holds for, of one for
    long ones the fewest.
    """

    blocks: tuple[tuple[str, int], ...]
    warps: int
    stages: tuple[int, ...]
    note: str
    split: int = 1
    traits: tuple[str, ...] = ()
    resident: int = 1
    limit: int = 0

    def matches(self, candidate: Candidate) -> bool:
        """True for the candidate with these blocks, warps, stages, split and traits, of which so many run together."""
        own = (dict(self.blocks), self.warps, self.stages, self.split, self.traits, self.resident)
        theirs = (candidate.warps, candidate.depths, candidate.split, candidate.traits, candidate.resident)
        return own == (dict(candidate.blocks), *theirs)

    def without(self, trait: str) -> Measured:
        """The same choice without a trait."""
        return replace(self, traits=tuple(item for item in self.traits if item != trait))


# (arch, kernel, head_dim, head_dim_v, causal, kind of the functions, length of the Spec) -> choice
TABLE: dict[Key, Measured] = {
    ("sm_90a", "attention_forward", 32, 32, False, "", ""): Measured(
        (("block_q", 192), ("block_kv", 144)),
        16,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 315 TFLOP/s, 1.04 times three blocks of 64 x 96, at 16384: "
        "python -m flashgen tune --direction fwd --head-dim 32 --full --seqlen 4096 --seqlen 16384",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 32, 32, False, "", "short"): Measured(
        (("block_q", 64), ("block_kv", 96)),
        8,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 1.20 times one block of 192 x 144, at 1024: "
        "python -m flashgen tune --direction fwd --head-dim 32 --full --seqlen 1024",
        traits=("dynamic", "guessed maximum"),
        resident=3,
        limit=1024,
    ),
    ("sm_90a", "attention_forward", 32, 32, True, "", ""): Measured(
        (("block_q", 192), ("block_kv", 144)),
        16,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 325 TFLOP/s, 1.09 times three blocks of 64 x 96, at 16384: "
        "python -m flashgen tune --direction fwd --head-dim 32 --causal --seqlen 4096 --seqlen 16384",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 32, 32, True, "", "short"): Measured(
        (("block_q", 64), ("block_kv", 96)),
        8,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 1.32 and 1.35 times one block of 192 x 144, at 512 and 1024: "
        "python -m flashgen tune --direction fwd --head-dim 32 --causal --seqlen 1024",
        traits=("dynamic", "guessed maximum"),
        resident=3,
        limit=1024,
    ),
    ("sm_90a", "attention_forward", 64, 64, False, "", ""): Measured(
        (("block_q", 192), ("block_kv", 128)),
        16,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-02, 350 to 535 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --full --preset full --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 64, 64, False, "", "short"): Measured(
        (("block_q", 64), ("block_kv", 64)),
        8,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 366 and 410 TFLOP/s beside 349 and 405 with one block of 192 x 128, at 512 and 1024: "
        "python -m flashgen tune --direction fwd --head-dim 64 --full --seqlen 512 --seqlen 1024",
        traits=("dynamic", "guessed maximum"),
        resident=3,
        limit=1024,
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "", ""): Measured(
        (("block_q", 192), ("block_kv", 128)),
        16,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-02, 367 to 508 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --causal --preset spine --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "", "short"): Measured(
        (("block_q", 64), ("block_kv", 64)),
        8,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 269, 352 and 383 TFLOP/s beside 230, 307 and 378 with one block of 128 x 128 or, at "
        "2048, 192 x 128, at 512, 1024 and 2048: "
        "python -m flashgen tune --direction fwd --head-dim 64 --causal --seqlen 512 --seqlen 1024 --seqlen 2048",
        traits=("dynamic", "guessed maximum"),
        resident=3,
        limit=2048,
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "window", ""): Measured(
        (("block_q", 64), ("block_kv", 64)),
        8,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 1.14 times one block of 128 x 128, which has 342 to 348 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --variant window --seqlen 4096 --seqlen 16384",
        traits=("dynamic", "guessed maximum"),
        resident=3,
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "wide_window", ""): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 342 to 348 TFLOP/s, with a window of 1024: "
        "python -m flashgen tune --direction fwd --head-dim 64 --variant window --seqlen 4096 --seqlen 16384"
        " --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "listed", ""): Measured(
        (("block_q", 64), ("block_kv", 64)),
        8,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 1.37 and 1.14 times one block of 128 x 128, 16 documents in 4096 and 16384 tokens: "
        "the planner's candidates with lists of blocks in turns; `bench --variant document` times the chosen one",
        traits=("dynamic", "guessed maximum"),
        resident=3,
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "softcap", ""): Measured(
        (("block_q", 192), ("block_kv", 80)),
        16,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 213 to 241 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 64 --variant softcap --seqlen 4096 --seqlen 16384"
        " --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 64, 64, True, "alibi", ""): Measured(
        (("block_q", 192), ("block_kv", 96)),
        16,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 359 to 425 TFLOP/s beside 345 to 396 without a guess: "
        "python -m flashgen tune --direction fwd --head-dim 64 --variant alibi --seqlen 4096 --seqlen 16384"
        " --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum", "last block first"),
    ),
    ("sm_90a", "attention_forward", 128, 128, False, "", ""): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-02, 462 to 639 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 128 --full --preset full --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 128, 128, False, "bias_bf16_tiled", ""): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 518 TFLOP/s beside 464 with 192 x 64, at 4096: "
        "python -m flashgen tune --direction fwd --head-dim 128 --variant bias --seqlen 4096 --rounds 3 --top 10",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 128, 128, False, "", "long"): Measured(
        (("block_q", 192), ("block_kv", 80)),
        16,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-02, 660 to 665 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 128 --full --preset spine --rounds 3",
        traits=("persistent", "in turns", "guessed maximum"),
        limit=8192,
    ),
    ("sm_90a", "attention_forward", 128, 128, True, "", ""): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-02, 337 to 522 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 128 --causal --preset full --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 128, 128, True, "", "long"): Measured(
        (("block_q", 128), ("block_kv", 160)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-12-02, 577 to 658 TFLOP/s, at 4096 (2026-12-03) 574 beside 581 with 128 keys: "
        "python -m flashgen tune --direction fwd --head-dim 128 --causal --preset spine --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum"),
        limit=8192,
    ),
    ("sm_90a", "attention_forward", 128, 128, True, "alibi", ""): Measured(
        (("block_q", 128), ("block_kv", 128)),
        12,
        (2, 2, 2),
        "NVIDIA H200, 2026-12-03, 549 to 583 TFLOP/s beside 481 to 508 without a guess: "
        "python -m flashgen tune --direction fwd --head-dim 128 --variant alibi --seqlen 4096 --seqlen 16384"
        " --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum", "last block first"),
    ),
    ("sm_90a", "attention_forward", 128, 128, True, "alibi", "long"): Measured(
        (("block_q", 128), ("block_kv", 160)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-12-03, 601 TFLOP/s beside 583 with 128 keys, at 16384: "
        "python -m flashgen tune --direction fwd --head-dim 128 --variant alibi --seqlen 16384 --rounds 3",
        traits=("dynamic", "in turns", "guessed maximum", "last block first"),
        limit=16384,
    ),
    ("sm_90a", "attention_backward", 128, 128, True, "", ""): Measured(
        (("block_kv", 128), ("block_q", 80)),
        12,
        (2, 2, 2, 2, 2),
        "NVIDIA H200, 2026-12-03, 1.05 times 64 queries at 16384 (566 TFLOP/s): "
        "python -m flashgen tune --direction bwd --head-dim 128 --causal --seqlen 16384",
        traits=("late", "dQ transposed"),
    ),
    ("sm_90a", "attention_backward", 128, 128, True, "", "short"): Measured(
        (("block_kv", 128), ("block_q", 64)),
        12,
        (2, 2, 2, 2, 2),
        "NVIDIA H200, 2026-12-03, 341 and 488 TFLOP/s beside 331 and 481 with 80 queries, at 1024 and 4096: "
        "python -m flashgen tune --direction bwd --head-dim 128 --causal --seqlen 1024 --seqlen 4096",
        traits=("late",),
        limit=4096,
    ),
    ("sm_90a", "attention_backward_dq", 128, 128, False, "", ""): Measured(
        (("block_q", 128), ("block_kv", 96)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-12-02, 467 TFLOP/s beside 450 with 128 keys, at 8192: "
        "the deterministic backward with each candidate for its last kernel",
    ),
    ("sm_90a", "attention_forward", 256, 256, False, "", ""): Measured(
        (("block_q", 128), ("block_kv", 80)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-12-02, 596 to 735 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 256 --full --preset full --rounds 3",
        traits=("persistent", "in turns", "guessed maximum"),
    ),
    ("sm_90a", "attention_forward", 256, 256, False, "", "short"): Measured(
        (("block_q", 128), ("block_kv", 64)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-12-02, 489 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 256 --full --seqlen 512 --rounds 3",
        traits=("persistent", "in turns", "guessed maximum"),
        limit=512,
    ),
    ("sm_90a", "attention_forward", 256, 256, True, "", ""): Measured(
        (("block_q", 128), ("block_kv", 80)),
        12,
        (2, 2),
        "NVIDIA H200, 2026-11-30, 669 TFLOP/s: "
        "python -m flashgen tune --direction fwd --head-dim 256 --causal --seqlen 4096",
        traits=("dynamic", "in turns", "guessed maximum"),
    ),
}


def kind(spec: Spec) -> str:
    """What the mask and score functions are: their names, without the numbers in them; "" where there are none.

    window=(1024, 0) is "window", softcap=50.0 "softcap", both "window_softcap", scores.bias of bfloat16 "bias_bf16": a
    line for one size is taken for all, but windows of many keys are "wide_window", and so are those of packed heads,
    which share few of the keys of a narrow one. What a user wrote has the name of its text, which no line has. Where
    tiles of arrays are copied it ends in "tiled": there is less room for the other tiles then.
    """
    words = [word for function in (spec.mask, spec.score) if function for word in _words(function, spec.packed)]
    return "_".join([*words, *(["tiled"] if spec.tiled else [])])


def _words(function: Function, packed: int) -> Iterator[str]:
    """The words of a function's name, and the types of its arrays, which are part of it."""
    types = {array.dtype.cuda for array in function.arrays}
    sides = re.match(r"window(\d+)_(\d+)", function.name)
    if sides and (packed > 1 or sum(map(int, sides.groups())) > NARROW):
        yield "wide"
    for word in function.name.split("_"):
        bare = word if word in types else re.split(r"\d", word)[0]
        if bare:
            yield bare


def lookup(kernel: str, spec: Spec, arch: Arch) -> Measured | None:
    """The measured choice for a kernel, or None; the usual one for a length without a line of its own.

    Functions of a kind without lines take that of masks whose blocks are listed, where theirs are, or else the line
    without functions, but for those that take other tiles.
    """
    key = _found(kernel, spec, arch)
    return None if key is None else TABLE[key]


def _found(kernel: str, spec: Spec, arch: Arch) -> Key | None:
    """The key of the line that a spec takes."""
    if _is_other(kernel, spec):
        return None
    keys = (_key(kernel, replace(spec, length=length), arch, of) for of in _kinds(spec) for length in (spec.length, ""))
    return next((key for key in keys if key in TABLE), None)


def _kinds(spec: Spec) -> tuple[str, ...]:
    """The kinds whose lines a spec may take, its own first."""
    if not (spec.mask or spec.score):
        return ("",)
    listed = [LISTED] if spec.listed and spec.score is None and spec.packed == 1 else []
    return (kind(spec), *listed, *([] if spec.tiled else [""]))


def has_own(kernel: str, spec: Spec, arch: Arch) -> bool:
    """True where `lookup` gives a line for functions of this very kind."""
    key = _found(kernel, spec, arch)
    return key is not None and key[5] == kind(spec)


def measured_with(kernel: str, spec: Spec, arch: Arch) -> str:
    """In words, for the end of a sentence, what functions a line was measured with where these are not the spec's."""
    key = _found(kernel, spec, arch)
    if key is None or key[5] == kind(spec):
        return ""
    return ", with documents for the mask" if key[5] == LISTED else ", without the mask and score functions"


def has_length(kernel: str, spec: Spec, arch: Arch) -> bool:
    """True where the length of the spec has a line of its own."""
    return _measured(kernel, spec) and bool(spec.length) and _key(kernel, spec, arch) in TABLE


def length(kernel: str, spec: Spec, arch: Arch, seqlen_k: int) -> str:
    """The `length` of the Spec that a call with so many keys should take.

    What lengths were not measured with takes the usual tile at every length.
    """
    if not _measured(kernel, spec):
        return ""
    short, long = (TABLE.get(_key(kernel, replace(spec, length=name), arch)) for name in ("short", "long"))
    if short and seqlen_k <= short.limit:
        return "short"
    return "long" if long and seqlen_k >= long.limit else ""


def _is_other(kernel: str, spec: Spec) -> bool:
    """True for the deterministic backward's main kernel, which leaves dQ to another: no line is for it."""
    return kernel == "attention_backward" and spec.deterministic


def _measured(kernel: str, spec: Spec) -> bool:
    """True for what lengths were measured with: one head a tile, sequences of one length, no dropout.

    Functions have lines of their kind, or none.
    """
    return not (spec.packed > 1 or spec.varlen or spec.dropout or _is_other(kernel, spec))


def by_length(kernel: str, spec: Spec, arch: Arch) -> list[str]:
    """A sentence for each length that has a tile of its own; none for what takes the usual one at every length."""
    if spec.length or not _measured(kernel, spec):
        return []
    found = []
    for name, words in (("short", "of up to {} keys"), ("long", "of {} keys and more")):
        other = TABLE.get(_key(kernel, replace(spec, length=name), arch))
        if other:
            tile = " x ".join(f"{block.removeprefix('block_')} {size}" for block, size in other.blocks)
            found.append(f"calls {words.format(other.limit)} take a tile of {tile} (--length {name} shows it)")
    return found


def line(kernel: str, spec: Spec, arch: Arch, candidate: Candidate, figure: str, command: str) -> str:
    """A measurement as an item of TABLE. figure: card, date and TFLOP/s. command: what measures it again."""
    values = [candidate.blocks, candidate.warps, candidate.depths]
    words = textwrap.wrap(command, WIDTH, drop_whitespace=False, break_on_hyphens=False)
    items = [*(f"{value!r}," for value in values), repr(f"{figure}: "), *map(repr, words)]
    items[-1] += ","
    items += [f"split={candidate.split},"] * (candidate.split != 1)
    items += [f"traits={candidate.traits!r},"] * bool(candidate.traits)
    items += [f"resident={candidate.resident},"] * (candidate.resident > 1)
    present = TABLE.get(_key(kernel, spec, arch))
    items += [f"limit={present.limit},"] if present and present.limit else []
    text = "".join(f"        {item}\n" for item in items)
    return f"    {_key(kernel, spec, arch)!r}: Measured(\n{text}    ),".replace("'", '"')


def _key(kernel: str, spec: Spec, arch: Arch, functions: str | None = None) -> Key:
    """functions: their kind; that of the spec where None."""
    of = kind(spec) if functions is None else functions
    return arch.name, kernel, spec.head_dim, spec.head_dim_v, spec.causal, of, spec.length
