"""Sliding window: the last 16 tokens, so that a cache of keys stays short (Mistral 7B, Gemma 2 and 3)."""

options = {"causal": True, "window": (15, 0)}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
