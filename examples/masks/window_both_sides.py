"""A window on both sides, for encoders of long texts (Longformer, the local layers of ModernBERT)."""

options = {"causal": False, "window": (8, 8)}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
