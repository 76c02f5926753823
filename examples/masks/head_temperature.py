"""A temperature for each head: the first attends broadly, the last sharply."""

import flashgen


def score_mod(score, b, h, q_idx, kv_idx):
    return score * (0.5 + 1.5 * h / flashgen.heads)


options = {"causal": True, "score_mod": score_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
