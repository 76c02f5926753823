"""A window that grows with the head: near and far are divided among the heads (as in multi-scale window attention)."""


def mask_mod(b, h, q_idx, kv_idx):
    return abs(q_idx - kv_idx) < 8 * (h + 1)


options = {"causal": "top-left", "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
