"""Blocks of 16, and 4 tokens that see all and are seen by all (ETC, BigBird without its random blocks)."""


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx // 16 == kv_idx // 16) | (q_idx < 4) | (kv_idx < 4)


options = {"causal": False, "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
