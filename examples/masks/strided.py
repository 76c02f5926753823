"""The last 8 tokens, and of all earlier ones every eighth (the strided Sparse Transformer, for images)."""

import flashgen

options = {"causal": True, "mask_mod": flashgen.masks.strided(8)}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
