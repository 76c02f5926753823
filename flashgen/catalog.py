"""The specs that generated/ holds, and the text of its files.

generated/sm80/<spec>/<kernel>.cu, .ir (TILE, then MACHINE) and .plan are written for sm_80, those in generated/sm90 for
sm_90a. Plans differ by chip, so the compile check of `make generate` takes each chip's own plan, and the texts of the
other chips are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from flashgen import build, masks, scores, variants
from flashgen.ir.dtype import BF16, F16, FP32
from flashgen.plan.arch import ARCHES
from flashgen.spec import Spec


def with_functions(causal: bool, **options: Any) -> Spec:
    """The spec of head_dim 128 and bfloat16 with options of a call."""
    bottom_right, mask, score = variants.functions(causal, **options)
    return Spec(128, 128, BF16, bottom_right, mask=mask, score=score)


SPECS = (
    Spec(64, 64, BF16, causal=False),
    Spec(64, 64, BF16, causal=True),
    Spec(128, 128, BF16, causal=False),
    Spec(128, 128, BF16, causal=True),
    Spec(256, 256, BF16, causal=False),
    Spec(256, 256, BF16, causal=True),
    Spec(64, 64, F16, causal=True),
    Spec(128, 128, F16, causal=True),
    Spec(64, 64, FP32, causal=True),  # three products of TF32 for each
    Spec(40, 40, BF16, causal=False),  # padded to 48 inside the kernel
    Spec(192, 128, BF16, causal=True),  # values narrower than keys
    Spec(128, 128, BF16, causal=True, deterministic=True),
    Spec(128, 128, BF16, causal=True, packed=8),  # few queries of grouped heads
    Spec(64, 64, BF16, causal=True, length="short"),  # tiles that suit few or many keys, and the others not
    Spec(256, 256, BF16, causal=False, length="short"),
    Spec(128, 128, BF16, causal=False, length="long"),
    Spec(128, 128, BF16, causal=True, length="long"),
    with_functions(True, softcap=50.0),
    with_functions(True, score_mod=scores.alibi),
    with_functions(False, window=(1024, 0)),
    with_functions(True, mask_mod=masks.document),
    Spec(128, 128, BF16, causal=True, varlen=True),  # packed sequences
    replace(with_functions(True, mask_mod=masks.document), listed=True),  # walks the lists of flashgen.block_mask
    Spec(576, 512, BF16, causal=True, shared_kv=True),  # MLA: values are the first columns of the keys
    replace(with_functions(False, score_mod=scores.bias, score_dtypes=(BF16,)), tiled=True),  # added by tiles
)

BLOCK_SIZE = 64  # of the kernel that counts for lists, by default
SHOWN = ARCHES["sm_80"]  # the chip whose text is kept
HOPPER = ARCHES["sm_90a"]  # whose text is kept for the kernels of its own family
COMPILED = tuple(ARCHES[name] for name in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_120"))


def forward_only(spec: Spec) -> bool:
    """True for a spec that only Hopper's forward heeds: of others there is no kernel of its own to show."""
    return spec.packed > 1 or bool(spec.length)


def files(spec: Spec) -> dict[str, str]:
    """The files that generated/ holds for a spec: path below generated/ -> text."""
    texts = {}
    made = (*build.everything(spec, SHOWN).values(), *build.everything(spec, HOPPER).values())
    if spec.listed:
        made += (build.block_counts(spec, SHOWN, BLOCK_SIZE),)
    if forward_only(spec):
        made = build.forward(spec, HOPPER)
    for stages in (item for item in made if item.plan.arch in (SHOWN, HOPPER)):
        path = f"{stages.plan.arch.family}/{spec}/{stages.tile.name}"
        texts[f"{path}.cu"] = stages.source.text
        texts[f"{path}.ir"] = f"{stages.tile_text}\n{stages.machine_text}"
        texts[f"{path}.plan"] = stages.plan.text()
    return texts


@dataclass
class Entry:
    """One kernel to compile, and the specs that it serves."""

    stages: build.Stages
    launch: int  # its place among the launches of its spec
    specs: list[Spec]


class Kernels:
    """The kernels of some specs on every chip; those that come to the same code on the same chip are one entry."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Entry] = {}

    def add(self, spec: Spec) -> None:
        """Plan and emit all kernels of a spec for every chip. Raises PlanError where one does not fit."""
        for arch in COMPILED:
            for launch, stages in enumerate(build.everything(spec, arch).values()):
                key = (stages.plan.arch.name, code(stages.source.text))  # sm_90a has kernels of sm_90
                entry = self._found.setdefault(key, Entry(stages, launch, []))
                if spec not in entry.specs:
                    entry.specs.append(spec)

    @property
    def entries(self) -> list[Entry]:
        """All of them: by spec in the order given, then in the order of the launches, the chips side by side."""
        specs = list(dict.fromkeys(entry.specs[0] for entry in self._found.values()))
        return sorted(self._found.values(), key=lambda entry: (specs.index(entry.specs[0]), entry.launch))


def code(text: str) -> str:
    """CUDA text without its comments: what decides whether two kernels are the same."""
    return "\n".join(line.split("//")[0].rstrip() for line in text.splitlines())
