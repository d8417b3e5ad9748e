"""Plots of a race: quality against speed, codes per pass, and codes per pass by row of the image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from lanternpp.evaluation.report import HEADINGS
from lanternpp.util.files import replacing

COSTS = ("frechet", "clip", "tv_cost")  # the first one measured stands on the plot of speed against quality
MARKS = "os^"  # so that labels of one colour differ


def draw(table: Sequence[Mapping[str, Any]], rows: Mapping[str, Sequence[float]], folder: Path) -> list[Path]:
    """speed.png, rows.png and passes.png in `folder`; those that the figures allow."""
    cost = next((c for c in COSTS if sum(row.get(c) is not None for row in table) > 1), None)
    figures = {
        "rows": curves(
            {label: (range(1, len(means) + 1), means) for label, means in rows.items()},
            "row of codes where the pass began",
            "codes per pass",
        ),
        "passes": curves(
            {row["method"]: shares(row["histogram"]) for row in table},
            "codes decided by one pass",
            "share of passes, %",
        ),
        **({"speed": speed(table, cost)} if cost else {}),
    }
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def shares(histogram: Mapping[int, int]) -> tuple[Sequence[float], Sequence[float]]:
    """Codes of a pass, and how often a pass decided so many, in percent."""
    codes = range(1, max(map(int, histogram)) + 1)
    return codes, [100 * histogram.get(k, 0) / sum(histogram.values()) for k in codes]


def throughput(table: Sequence[Mapping[str, Any]]) -> Any:
    """Pictures per second against the batch size, a line per method."""
    lines = {}
    for label in dict.fromkeys(row["method"] for row in table):
        rows = [row for row in table if row["method"] == label]
        lines[label] = [row["batch_size"] for row in rows], [row["pictures_per_second"] for row in rows]
    figure = curves(lines, "pictures at once", "pictures per second")
    figure.axes[0].set_xscale("log", base=2)
    return figure


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str) -> Any:
    """Lines of (x, y) by their names."""
    with axes_of(x, y) as axes:
        for i, (label, points) in enumerate(lines.items()):
            axes.plot(*points, f"C{i % 10}.{'-' if i < 10 else '--'}", label=fill(label, 22))
        axes.set_ylim(bottom=0)
    return axes.figure


def speed(table: Sequence[Mapping[str, Any]], cost: str) -> Any:
    """Cost against speed-up, a point per method."""
    better = "higher is better" if cost == "clip" else "lower is better"
    with axes_of("speed-up over plain decoding", f"{HEADINGS[cost]} ({better})") as axes:
        for i, row in enumerate(table):
            if row.get(cost) is not None:
                style = {"fmt": MARKS[i % len(MARKS)], "color": f"C{i % 10}", "alpha": 0.9, "capsize": 2}
                point = row["speedup"], row[cost], row.get(f"{cost}_spread")
                axes.errorbar(*point, **style, label=fill(row["method"], 22))
        axes.axvline(1, color="grey", linewidth=0.8)
    return axes.figure


@contextmanager
def axes_of(x: str, y: str) -> Iterator[Any]:
    """The axes of a new figure, drawn without a display; in the end the names of its lines are put beside it."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    axes = fig.add_subplot(xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    yield axes
    fig.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)


def save(fig: Any, path: Path) -> Path:
    """The figure as a PNG, written whole."""
    with replacing(path) as temporary:
        fig.savefig(temporary, format="png")
    return path
