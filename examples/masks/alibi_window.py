"""ALiBi within a window: what is far away would weigh next to nothing, so it is not visited."""

import flashgen

options = {"causal": True, "window": (23, 0), "score_mod": flashgen.scores.alibi}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
