"""An image, tokens 16 to 39, between text: its tokens see each other, and the text is causal (Transfusion, Gemma 3)."""


def of_image(idx):
    return (idx >= 16) & (idx < 40)


def mask_mod(b, h, q_idx, kv_idx):
    return (kv_idx <= q_idx) | (of_image(q_idx) & of_image(kv_idx))


options = {"causal": False, "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
