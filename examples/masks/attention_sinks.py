"""A window and the first 4 tokens, on which attention leans while text streams (StreamingLLM)."""

import flashgen


def mask_mod(b, h, q_idx, kv_idx):
    return (kv_idx < 4) | (q_idx + (flashgen.seqlen_k - flashgen.seqlen_q) - kv_idx < 16)


options = {"causal": True, "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
