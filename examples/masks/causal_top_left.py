"""Causal from the top left: query i sees keys up to i, also where there are more keys, such as padding, behind them."""

options = {"causal": "top-left"}

if __name__ == "__main__":
    from compare import with_dense

    with_dense(options)
