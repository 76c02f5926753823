"""ALiBi: less for keys that are further away, by a slope of the head, in place of positions (BLOOM, MPT)."""

import flashgen

options = {"causal": True, "score_mod": flashgen.scores.alibi}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
