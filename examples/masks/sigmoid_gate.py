"""A sigmoid of the distance gates each weight: the span fades out around 24 tokens (adaptive span has a ramp there)."""

import flashgen


def score_mod(score, b, h, q_idx, kv_idx):
    return score + flashgen.log(flashgen.sigmoid((24.0 - abs(q_idx - kv_idx)) / 4.0))


options = {"causal": "top-left", "score_mod": score_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
