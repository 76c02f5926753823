"""Pixels of an image, 8 a row, see those at most 2 rows and 2 columns away (neighbourhood attention, NATTEN)."""


def mask_mod(b, h, q_idx, kv_idx):
    rows, columns = q_idx // 8 - kv_idx // 8, q_idx % 8 - kv_idx % 8
    return (abs(rows) <= 2) & (abs(columns) <= 2)


options = {"causal": False, "mask_mod": mask_mod}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
