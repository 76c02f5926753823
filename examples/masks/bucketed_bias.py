"""A bias for each bucket of distances, 8 exact and then logarithmic, by a formula (T5: scores.relative_bias)."""

import flashgen


def score_mod(score, b, h, q_idx, kv_idx):
    distance = abs(q_idx - kv_idx)
    far = 8.0 + 8.0 * flashgen.log(flashgen.maximum(distance, 8) / 8.0) / flashgen.log(16.0)
    return score - 0.1 * (h + 1) * flashgen.where(distance < 8, 1.0 * distance, flashgen.minimum(far, 15.0))


options = {"causal": False, "score_mod": score_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
