"""Documents of 24 tokens packed into one sequence: none sees another (batches of training without padding)."""


def mask_mod(b, h, q_idx, kv_idx):
    return q_idx // 24 == kv_idx // 24


options = {"causal": "top-left", "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
