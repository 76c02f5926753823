"""Mask and score functions for tests, by name: what is built in, and some that a user might write."""

import math

import flashgen as fg
from flashgen import masks, scores, variants


def by_head(b, h, q_idx, kv_idx):
    """The first head looks back, the others see a distance that grows with the head."""
    return ((h == 0) & (kv_idx <= q_idx)) | ((h > 0) & (abs(q_idx - kv_idx) < 4 * h + 3))


def of_batches(b, h, q_idx, kv_idx):
    return fg.where(b == 0, kv_idx % 3 != 1, (q_idx + kv_idx) % 2 == 0)


MASKS = {
    "left": masks.window(5, 0),
    "both sides": masks.window(9, 4, top_left=True),
    "right": masks.window(None, 2),
    "top left": masks.causal_top_left,
    "prefix": masks.prefix(7),
    "chunked": masks.chunked(6),
    "dilated": masks.dilated(3),
    "strided": masks.strided(4),
    "by head": by_head,
    "of batches": of_batches,
    "nothing": lambda b, h, q_idx, kv_idx: kv_idx < 0,
}
SCORES = {
    "softcap": scores.softcap(1.5),
    "alibi": scores.alibi,
    "bias": lambda score, b, h, q_idx, kv_idx: score + 0.1 * fg.sin(q_idx * 0.7 - kv_idx) * (h + 1) / 2,
    "gate": lambda score, b, h, q_idx, kv_idx: 2.5 * fg.sigmoid(score) + fg.minimum(score, 0.5 * b),
    "masking": lambda score, b, h, q_idx, kv_idx: fg.where((q_idx + kv_idx) % 3 == 0, score, -math.inf),
    "infinite": lambda score, b, h, q_idx, kv_idx: fg.log(abs(score)) + 0.001 / score,
    "far above": lambda score, b, h, q_idx, kv_idx: score + fg.where(kv_idx > 15, 1000.0, 0.0) + kv_idx // 8 * 10,
    "root": lambda score, b, h, q_idx, kv_idx: fg.sqrt(abs(score) + 0.25) - fg.log(score * score + 1.0) / 3,
}


def traced(causal=False, mask=None, score=None, **more):
    """The fields of a Spec for names of this module."""
    mods = {"mask_mod": MASKS.get(mask), "score_mod": SCORES.get(score)}
    causal, mask, score = variants.functions(causal, **mods, **more)
    return {"causal": causal, "mask": mask, "score": score}
