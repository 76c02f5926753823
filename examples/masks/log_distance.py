"""A penalty that grows with the logarithm of the distance, for texts longer than those of training (KERPLE)."""

import flashgen


def score_mod(score, b, h, q_idx, kv_idx):
    return score - 0.5 * flashgen.log(1.0 + abs(q_idx - kv_idx))


options = {"causal": "top-left", "score_mod": score_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
