"""Scores stay between -50 and 50, which keeps training steady (Gemma 2)."""

options = {"causal": True, "softcap": 50.0}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
