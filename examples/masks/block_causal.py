"""Causal by blocks of 12: the tokens of a frame see each other and all earlier frames (video, block diffusion)."""


def mask_mod(b, h, q_idx, kv_idx):
    return kv_idx // 12 <= q_idx // 12


options = {"causal": False, "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
