"""Every second of the last 32 tokens: a longer reach for the same work (Longformer, LongNet)."""


def mask_mod(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 2 == 0) & (q_idx - kv_idx < 32)


options = {"causal": "top-left", "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
