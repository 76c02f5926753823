"""Chunks: a token sees what came before it in its chunk of 16 (the local layers of Llama 4)."""

import flashgen

options = {"causal": True, "mask_mod": flashgen.masks.chunked(16)}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
