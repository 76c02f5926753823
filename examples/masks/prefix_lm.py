"""Prefix-LM: all see the prompt of 20 tokens, and the answer is causal (T5, UniLM, PaliGemma)."""

import flashgen

options = {"causal": False, "mask_mod": flashgen.masks.prefix(20)}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
