"""Specs for the lines of plan/tuned.py."""

from dataclasses import replace

from flashgen import build, variants
from flashgen.attention import tiles
from flashgen.bench.variants import OF_ONE_LENGTH, functions
from flashgen.plan import tuned
from flashgen.spec import Spec


def of_variant(variant, causal=True):
    """The options of a Spec with the functions of a variant of the benchmark."""
    causal, mask, score = functions(variant, causal)
    return {"causal": causal, "mask": mask, "score": score}


# What `tune` gives lines for: options by the kind of their functions, whose arrays lie as TMA asks where they can.
KINDS = {
    tuned.kind(replace(spec, tiled=tiled)): (name, tiled)
    for name in ("", *OF_ONE_LENGTH)
    for spec in [Spec(**of_variant(name))]
    for tiled in ((False, True) if tiles.fit(spec) else (False,))
}


def of_kind(kind, causal):
    """The options of a Spec that takes the lines of a kind."""
    if kind == tuned.LISTED:
        return of_variant("document", causal) | {"listed": True}
    if kind == "wide_window":
        causal, mask, score = variants.functions(causal, window=(tuned.NARROW, 1))
        return {"causal": causal, "mask": mask, "score": score}
    variant, tiled = KINDS[kind]
    return of_variant(variant, causal) | {"tiled": tiled}


def spec_of(key, **others):
    """The Spec of a line, or of one without its length."""
    length = dict(zip(("length",), key[6:], strict=False))
    deterministic = key[1] == "attention_backward_dq"
    return Spec(key[2], key[3], **(of_kind(key[5], key[4]) | {"deterministic": deterministic} | length | others))


def stages_of(key, arch):
    """The kernel that a line is for."""
    make = build.forward if key[1] == "attention_forward" else build.backward
    return next(stages for stages in make(spec_of(key), arch) if stages.tile.name == key[1])
