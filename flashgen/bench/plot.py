"""The picture of a benchmark: small multiples, one panel for each direction, head dim and mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashgen.bench.report import OWN, directions, mask, peer_names, summary, tflops

# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ too, for print without colour.
STYLES = {
    "flashgen": ("#D55E00", "o"),
    "fa2": ("#0072B2", "s"),
    "cudnn": ("#009E73", "^"),
    "flex": ("#CC79A7", "v"),
    "fa3": ("#56B4E9", "D"),
    "fa4": ("#000000", "P"),
    "varlen": ("#E69F00", "X"),
}
DIRECTION = {"fwd": "forward", "bwd": "backward"}


def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG: TFLOP/s over sequence length, a line a peer, named at its right end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = directions(results)
    columns = list(dict.fromkeys((cell["head_dim"], mask(cell)) for cell in results["cells"]))
    size = (3.1 * len(columns) + 0.6, 2.7 * len(rows) + 0.9)
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row, direction in zip(axes, rows, strict=True):
        for axis, column in zip(row, columns, strict=True):
            draw_panel(axis, results, direction, *column)
        row[0].set_ylabel(f"{DIRECTION[direction]}, TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    figure.suptitle(title(results), fontsize=10, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white")
    plt.close(figure)


def title(results: dict[str, Any]) -> str:
    """The card, what cuBLAS reaches on it, and flashgen's means, in two lines."""
    before = results["cublas_tflops"]["before"]
    first = f"bf16 attention on {results['environment']['card']} (cuBLAS {before:.0f} TFLOP/s), higher is better"
    means = [
        f"{DIRECTION[direction]} {mean['fa2']:.2f} of fa2, {mean['best']:.2f} of the best peer"
        for direction, mean in summary(results).items()
        if "fa2" in mean and "best" in mean
    ]
    return "\n".join([first, *(["flashgen, geometric means: " + "; ".join(means)] if means else [])])


def draw_panel(axis: Any, results: dict[str, Any], direction: str, head_dim: int, kind: str) -> None:
    """One panel: a line a peer over the cells of one direction, head dim and mask."""
    chosen = [
        cell
        for cell in results["cells"]
        if (cell["direction"], cell["head_dim"], mask(cell)) == (direction, head_dim, kind)
    ]
    lengths = sorted({cell["seqlen"] for cell in results["cells"]})
    ends: dict[str, tuple[int, float]] = {}
    for name in reversed(peer_names(results)):  # flashgen last, on top
        points = sorted((cell["seqlen"], rate) for cell in chosen if (rate := tflops(cell, name)) is not None)
        if points:
            colour, marker = STYLES.get(name, ("#777777", "x"))
            width = 2.4 if name == OWN else 1.3
            axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=width)
            ends[name] = points[-1]
    axis.set_title(f"head dim {head_dim}, {kind}", fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [short(length) for length in lengths])
    axis.minorticks_off()
    axis.set_xlim(lengths[0] / 1.25, lengths[-1] * (1.25 + 0.55 * max(1.0, len(lengths) / 4)))
    axis.set_ylim(0, highest(results, direction) * 1.08)
    axis.grid(axis="y", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    name_lines(axis, ends, gap=highest(results, direction) * 0.075)


def name_lines(axis: Any, ends: dict[str, tuple[int, float]], gap: float) -> None:
    """Writes each peer's name beside the last point of its line, moved up or down so that none overlap."""
    order = sorted(ends, key=lambda name: ends[name][1])
    heights = spread_out([ends[name][1] for name in order], gap)
    for name, height in zip(order, heights, strict=True):
        colour, _ = STYLES.get(name, ("#777777", "x"))
        weight = "bold" if name == OWN else "normal"
        axis.annotate(
            name, (ends[name][0], height), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=8, color=colour, fontweight=weight,
        )  # fmt: skip


def spread_out(heights: list[float], gap: float) -> list[float]:
    """Heights in rising order, moved as little as keeps neighbours `gap` apart: close ones share their middle."""
    groups: list[list[float]] = []  # [centre, count]
    for height in heights:
        groups.append([height, 1])
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < gap * (groups[-1][1] + groups[-2][1]) / 2:
            (centre, count), (below, fewer) = groups.pop(), groups.pop()
            groups.append([(centre * count + below * fewer) / (count + fewer), count + fewer])
    return [centre + gap * (index - (count - 1) / 2) for centre, count in groups for index in range(int(count))]


def highest(results: dict[str, Any], direction: str) -> float:
    """The highest rate of a direction, TFLOP/s."""
    cells = [cell for cell in results["cells"] if cell["direction"] == direction]
    return max((rate for cell in cells for name in cell["results"] if (rate := tflops(cell, name))), default=1.0)


def short(length: int) -> str:
    """512, 1k, 16k."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
