"""Causal: a token sees itself and what came before it, as in every decoder of text."""

options = {"causal": True}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
