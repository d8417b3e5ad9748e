"""A race as pictures: what speed costs, how many codes a pass decides, and where in the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from lanternpp.evaluation.report import HEADINGS
from lanternpp.util.files import replacing

COSTS = ("frechet", "clip", "tv_cost")  # the first one measured stands on the plot of speed against quality
MARKS = "os^"  # so that labels of one colour differ


def draw(table: Sequence[Mapping[str, Any]], rows: Mapping[str, Sequence[float]], folder: Path) -> list[Path]:
    """speed.png, rows.png and passes.png in `folder`; those that the figures allow."""
    written = []
    cost = next((c for c in COSTS if sum(row.get(c) is not None for row in table) > 1), None)
    if cost:
        written.append(save(speed(table, cost), folder / "speed.png"))
    written.append(save(codes_by_row(rows), folder / "rows.png"))
    written.append(save(passes(table), folder / "passes.png"))
    return written


def figure() -> tuple[Any, Any]:
    """An empty figure and its axes, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    fig = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(fig)
    axes = fig.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return fig, axes


def save(fig: Any, path: Path) -> Path:
    """The figure as a PNG, written whole."""
    with replacing(path) as temporary:
        fig.savefig(temporary, format="png")
    return path


def speed(table: Sequence[Mapping[str, Any]], cost: str) -> Any:
    """Speed-up against what it costs, a point per method."""
    fig, axes = figure()
    for i, row in enumerate(table):
        if row.get(cost) is None:
            continue
        spread = row.get(f"{cost}_spread")
        axes.errorbar(
            *(row["speedup"], row[cost], spread),
            fmt=MARKS[i % len(MARKS)],
            color=f"C{i % 10}",
            alpha=0.9,
            capsize=2,
            label=lines(row["method"]),
        )
    axes.axvline(1, color="grey", linewidth=0.8)
    better = "higher is better" if cost == "clip" else "lower is better"
    return finished(fig, axes, "speed-up over plain AR", f"{HEADINGS[cost]} ({better})")


def codes_by_row(rows: Mapping[str, Sequence[float]]) -> Any:
    """Codes per pass along the rows of the image, a line per method."""
    fig, axes = figure()
    for i, (label, means) in enumerate(rows.items()):
        axes.plot(range(1, len(means) + 1), means, label=lines(label), **style(i))
    return finished(fig, axes, "row of codes where the pass began", "codes per pass", bottom=0)


def passes(table: Sequence[Mapping[str, Any]]) -> Any:
    """How often a pass decided so many codes, a line per method."""
    fig, axes = figure()
    for i, row in enumerate(table):
        counts = row["histogram"]
        most, total = max(map(int, counts)), sum(counts.values())
        share = [100 * counts.get(k, 0) / total for k in range(1, most + 1)]
        axes.plot(range(1, most + 1), share, marker=".", label=lines(row["method"]), **style(i))
    return finished(fig, axes, "codes decided by one pass", "share of passes, %", bottom=0)


def throughput(table: Sequence[Mapping[str, Any]]) -> Any:
    """Pictures per second against the batch size, a line per method."""
    fig, axes = figure()
    for i, label in enumerate(dict.fromkeys(row["method"] for row in table)):
        rows = [(row["batch_size"], row["pictures_per_second"]) for row in table if row["method"] == label]
        axes.plot(*zip(*rows, strict=True), marker=".", label=lines(label), **style(i))
    axes.set_xscale("log", base=2)
    return finished(fig, axes, "pictures at once", "pictures per second", bottom=0)


def lines(label: str) -> str:
    """A long label on several lines."""
    return fill(label, 22)


def style(number: int) -> dict[str, str]:
    """The colour and dashes of a line."""
    return {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}


def finished(fig: Any, axes: Any, x: str, y: str, bottom: float | None = None) -> Any:
    """The figure with its axes named, and the names of the lines beside them."""
    axes.set(xlabel=x, ylabel=y)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    legend(fig, axes)
    return fig


def legend(fig: Any, axes: Any) -> None:
    """The names of the lines, beside the axes."""
    fig.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
