"""Every fourth key is dropped, but a token sees itself: a cache that has been thinned out."""


def mask_mod(b, h, q_idx, kv_idx):
    return (kv_idx % 4 != 3) | (kv_idx == q_idx)


options = {"causal": "top-left", "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
