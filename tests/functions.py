"""Mask and score functions for tests, by name: what is built in, and some that a user might write."""

import math

import numpy as np

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
    "wave": lambda score, b, h, q_idx, kv_idx: score + 0.1 * fg.sin(q_idx * 0.7 - kv_idx) * (h + 1) / 2,
    "gate": lambda score, b, h, q_idx, kv_idx: 2.5 * fg.sigmoid(score) + fg.minimum(score, 0.5 * b),
    "masking": lambda score, b, h, q_idx, kv_idx: fg.where((q_idx + kv_idx) % 3 == 0, score, -math.inf),
    "infinite": lambda score, b, h, q_idx, kv_idx: fg.log(abs(score)) + 0.001 / score,
    "far above": lambda score, b, h, q_idx, kv_idx: score + fg.where(kv_idx > 15, 1000.0, 0.0) + kv_idx // 8 * 10,
    "root": lambda score, b, h, q_idx, kv_idx: fg.sqrt(abs(score) + 0.25) - fg.log(score * score + 1.0) / 3,
}


def relative(score, b, h, q_idx, kv_idx, table):
    """A number by head and distance; those that are further away share the last one."""
    return score + table[h, abs(q_idx - kv_idx)]


def buckets(score, b, h, q_idx, kv_idx, table, bucket):
    """The same by a bucket of the distance, which is loaded too; it has a slope that is loaded."""
    return score * table[1, h] - table[bucket[abs(q_idx - kv_idx)] % 2, h]


def lengths(b, h, q_idx, kv_idx, ends):
    return kv_idx < ends[b]


def visible(b, h, q_idx, kv_idx, shown):
    return shown[b, h, q_idx, kv_idx] > 0


# With arrays, and how these are made by NumPy, or by torch on the host, from a generator of NumPy and the sizes.
READING_MASKS = {"document": masks.document, "lengths": lengths, "visible": visible}
READING_SCORES = {"bias": scores.bias, "slopes": scores.slopes, "relative": relative, "buckets": buckets}
MASKS_AND_SCORES = [*((name, None) for name in READING_MASKS), *((None, name) for name in READING_SCORES)]
ARRAYS = {
    "mask_ids": lambda draw, b, h, q, k: np.sort(draw.integers(0, 4, (max(q, k), b)).astype(np.int32), axis=0).T,
    "mask_ends": lambda draw, b, h, q, k: draw.integers(1, k + 1, 2 * b).astype(np.int32)[::2],
    "mask_shown": lambda draw, b, h, q, k: draw.integers(0, 2, (k, b, 1, q)).astype(np.int32).transpose(1, 2, 3, 0),
    "score_biases": lambda draw, b, h, q, k: draw.standard_normal((h, 1, q, k)).astype(np.float32).swapaxes(0, 1),
    "score_of_heads": lambda draw, b, h, q, k: draw.random(h).astype(np.float32),
    "score_table": lambda draw, b, h, q, k: draw.standard_normal((h, 9)).astype(np.float32),
    "score_bucket": lambda draw, b, h, q, k: np.arange(max(q, k), dtype=np.int32) // 3,
}
EXPANDED = ("mask_shown", "score_biases")  # to the batch and the heads, with strides of zero


def arrays_of(spec, batch, heads, seqlen_q, seqlen_k, seed=0):
    """NumPy arrays for what the functions of a spec read, by name: permuted, with gaps, and with strides of zero."""
    draw = np.random.default_rng(seed)
    found = {}
    for item in spec.arrays:
        array = ARRAYS[item.name](draw, batch, heads, seqlen_q, seqlen_k)
        if item.name == "score_table" and "score_bucket" in [other.name for other in spec.arrays]:
            array = array[:, :2].T
        if item.name in EXPANDED:
            array = np.broadcast_to(array, (batch, heads, seqlen_q, seqlen_k))
        found[item.name] = array
    return found


def traced(causal=False, mask=None, score=None, **more):
    """The fields of a Spec for names of this module."""
    assert not (MASKS.keys() & READING_MASKS or SCORES.keys() & READING_SCORES)
    mods = {"mask_mod": (MASKS | READING_MASKS).get(mask), "score_mod": (SCORES | READING_SCORES).get(score)}
    causal, mask, score = variants.functions(causal, **mods, **more)
    return {"causal": causal, "mask": mask, "score": score}
