"""A window with a soft edge: beyond 16 tokens a score loses 0.25 for each token more."""

import flashgen


def score_mod(score, b, h, q_idx, kv_idx):
    return score - 0.25 * flashgen.maximum(abs(q_idx - kv_idx) - 16, 0)


options = {"causal": False, "score_mod": score_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
