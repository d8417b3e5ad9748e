"""A race as figures: one row per method, a Markdown table, one JSON object, plots."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heapreplace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, quantiles
from textwrap import fill
from typing import Any

from lanternpp.api.options import BASELINE, draft_of
from lanternpp.engine.decode import PHASES
from lanternpp.errors import counted
from lanternpp.evaluation.race import Turn
from lanternpp.util.files import replacing, write_text
from lanternpp.util.jsonfile import write_json
from lanternpp.util.terminal import show_table

COLUMNS = {  # the heading and the format of each figure
    "method": ("method", "`{}`"),
    "batch_size": ("batch", "{}"),
    "draft": ("draft", "{}"),
    "pictures_per_second": ("pictures per s", "{:.3g}"),
    "codes_per_pass": ("codes per pass", "{:.2f}"),
    "seconds_per_image": ("s per picture", "{:.2f}"),
    "speedup": ("speed-up", "{:.2f}x"),
    "efficiency": ("efficiency", "{:.2f}"),
    "where": ("draft / pass / verify / rest, %", "{}"),
    "tv_cost": ("TV cost", "{:.2f}"),
    "tv_per_code": ("TV per code", "{:.3g}"),
    "latency": ("latency, s", "{:.2f}"),
    "latency_speedup": ("speed-up", "{:.2f}x"),
    "step_compression": ("step compression", "{:.2f}x"),
    "frechet": ("Fréchet", "{:.2f}"),
    "precision": ("precision", "{:.2f}"),
    "recall": ("recall", "{:.2f}"),
    "prompt_accuracy": ("prompt accuracy", "{:.0%}"),
    "clip": ("CLIP", "{:.2f}"),
}
QUALITY = ("frechet", "precision", "recall", "prompt_accuracy", "clip")
# The columns of LANTERN++'s tables (arXiv 2502.06352): means over pictures, the prefill not among the passes.
PAPER_ONLY = ("latency", "latency_speedup", "step_compression")
PAPER = ("method", "batch_size", "draft", *PAPER_ONLY, *QUALITY)
OURS = tuple(name for name in COLUMNS if name not in PAPER_ONLY)
WIDE = ("where", "precision", "recall")  # columns left out on a terminal
BATCHES = ("batch_size", "draft", "pictures_per_second")  # columns shown where batch sizes are compared
COSTS = ("frechet", "clip", "tv_cost")  # against which speed is plotted: the first that was measured
PLOTS = ("rows", "passes", "speed", "throughput")
MARKS = "os^"  # markers, by which points of one colour differ


def rows(
    turns: Sequence[Turn], run: Mapping[str, Any], quality: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """Return a row for each method of a run, in the run's order; `quality` holds further figures by label.

    Seconds are medians over turns, their spread the distance between the quartiles.
    """
    plain = figures([turn for turn in turns if turn.label == BASELINE])
    table = []
    for label, settings in run["methods"].items():
        method_turns = [turn for turn in turns if turn.label == label]
        row = {"method": label, "model": run["model"], "batch_size": settings["batch_size"]}
        row["steps"] = sum(steps(turn.accepted, settings["batch_size"]) for turn in method_turns)
        draft = draft_of(settings) or "none"
        row["draft"] = f"{draft}, fitted" if settings["fit"] else draft
        row |= figures(method_turns)
        row["speedup"] = plain["seconds_per_image"] / row["seconds_per_image"]
        row["efficiency"] = row["speedup"] / row["codes_per_pass"]
        row["latency_speedup"] = plain["latency"] / row["latency"]
        row |= dict(quality.get(label, {})) | {"settings": settings, "versions": run["versions"]}
        table.append(row)
    return table


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of one method's turns."""
    pictures = [accepted for turn in turns for accepted in turn.accepted]
    counts = [count for accepted in pictures for count in accepted]
    seconds = sum(turn.seconds for turn in turns)
    image_seconds = [turn.seconds / len(turn.accepted) for turn in turns]
    quartiles = quantiles(image_seconds, n=4, method="inclusive") if len(turns) > 1 else image_seconds * 3
    tv_costs = [tv_cost for turn in turns for tv_cost in turn.tv_cost or []]
    phase_seconds = {phase: sum(turn.phases[phase] for turn in turns) for phase in PHASES}
    all_phases = sum(phase_seconds.values())
    return {
        "images": len(pictures),
        "codes": sum(counts),
        "passes": len(counts),
        "codes_per_pass": sum(counts) / len(counts),
        "seconds": seconds,
        "pictures_per_second": len(pictures) / seconds,
        "latency": seconds / len(pictures),
        "step_compression": fmean(sum(accepted[1:]) / max(1, len(accepted) - 1) for accepted in pictures),
        "seconds_per_image": median(image_seconds),
        "seconds_quartiles": [quartiles[0], quartiles[2]],
        "phases": {phase: value / all_phases for phase, value in phase_seconds.items()},
        "accepted_per_pass": counts,
        "histogram": dict(sorted(Counter(counts).items())),
        "tv_cost": fmean(tv_costs) if tv_costs else None,
        "tv_cost_images": len(tv_costs),
    }


def steps(pictures: Sequence[Sequence[int]], batch_size: int) -> int:
    """Return the steps in which an engine draws pictures, given as their accepted codes: each takes the slot that is free first."""
    ends = [0] * batch_size
    for accepted in pictures:
        heapreplace(ends, ends[0] + len(accepted) - 1)  # the first entry is the prefill, which is no step
    return max(ends)


def by_row(turns: Sequence[Turn], width: int) -> dict[str, list[float]]:
    """Return by label the mean codes of the passes that began in each row of the image; NaN for a row in which no pass began."""
    counts_by_row: dict[str, dict[int, list[int]]] = {turn.label: {} for turn in turns}
    for turn in turns:
        for accepted in turn.accepted:
            # The prefill is left out, as it decides one code whatever the method.
            for position, count in zip(accumulate(accepted), accepted[1:], strict=False):
                counts_by_row[turn.label].setdefault(position // width, []).append(count)
    return {
        label: [fmean(counts.get(row, [math.nan])) for row in range(max(counts, default=-1) + 1)]
        for label, counts in counts_by_row.items()
    }


def cell(row: Mapping[str, Any], column: str, brief: bool = False) -> str:
    """Return one figure of a row as text, with its spread unless brief, or a dash if the figure was not measured."""
    if column == "where":
        return " / ".join(f"{100 * row['phases'][phase]:.0f}" for phase in PHASES)
    if row.get(column) is None:
        return "-"
    text = COLUMNS[column][1].format(row[column]).replace("%", " %")
    if column == "seconds_per_image" and not brief:
        text += " ({:.2f}-{:.2f})".format(*row["seconds_quartiles"])
    if column == "frechet" and row.get("frechet_spread") is not None and not brief:
        text += f" ± {row['frechet_spread']:.2f}"
    return text


def columns(table: Sequence[Mapping[str, Any]], names: Sequence[str] = OURS) -> list[str]:
    """Return the columns with a figure in some row; `BATCHES` only if batch sizes differ, but drafts also if a draft was fitted."""
    measured = [c for c in names if c == "where" or any(row.get(c) is not None for row in table)]
    if len({row["batch_size"] for row in table}) > 1:
        return measured
    fitted = any(row["settings"]["fit"] for row in table)
    return [c for c in measured if c not in BATCHES or (c == "draft" and fitted)]


def comma_separated(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the columns as CSV: the figures are not rounded, and have the names of bench.json."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(table, names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def markdown(table: Sequence[Mapping[str, Any]], run: Mapping[str, Any], names: Sequence[str] = OURS) -> str:
    """Return the table in Markdown, and below the table its settings."""
    shown = columns(table, names)
    lines = [[COLUMNS[name][0] for name in shown], ["---", *["--:"] * (len(shown) - 1)]]
    lines += [[cell(row, name) for name in shown] for row in table]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{text}\n{settings_line(table, run, names)}\n"


def count_range(counts: Iterable[int]) -> str:
    """Return the count that all rows share, or the least and the greatest; no text if there are no counts."""
    ordered = sorted(set(counts))
    if len(ordered) > 1:
        return f"{ordered[0]} to {ordered[-1]}"
    return str(ordered[0]) if ordered else ""


def settings_line(table: Sequence[Mapping[str, Any]], run: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the settings and the machine of the figures in one sentence."""
    plain = run["methods"][BASELINE]
    images = count_range(row["images"] for row in table)
    batch_sizes = count_range(row["batch_size"] for row in table)
    tv_images = count_range(row["tv_cost_images"] for row in table if row["tv_cost"] and "tv_cost" in names)
    statistics = "means over pictures" if names is PAPER else "medians, quartiles in brackets"
    return (
        f"{run['model']}, {counted(images, 'picture')} of {counted(len(run['prompts']), 'prompt')} per method, "
        f"{batch_sizes} at a time, methods taking turns; {statistics}. "
        f"cfg {plain['cfg']:g}, temperature {plain['temperature']:g}, top-k {plain['top_k']}, top-p {plain['top_p']:g}; "
        f"{run['dtype']}, {'compiled' if plain['compile'] else 'not compiled'}, {run['device']}, "
        f"{counted(run['threads'], 'thread')}, torch {run['versions']['torch']}."
        + (f" TV cost: mean of {counted(tv_images, 'picture')}." if tv_images else "")
    )


def show(table: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print the figures as a table, without `WIDE` columns of our own."""
    shown = [name for name in columns(table, names) if names is PAPER or name not in WIDE]
    lines = [[cell(row, name, brief=True).strip("`") for name in shown] for row in table]
    caption = "quartiles, and where the time goes: table.md"
    show_table([COLUMNS[name][0] for name in shown], lines, caption=caption)


def write(
    table: Sequence[dict[str, Any]], run: Mapping[str, Any], folder: Path, plots: bool, source: str | None
) -> dict[str, Any]:
    """Write the tables and bench.json, and throughput.png of several batch sizes; return the content of bench.json.

    source: the publication of the settings.
    """
    result = {**run, "folder": str(folder), "methods": table} | ({"paper": source} if source else {})
    settings = f"\nSettings of {source}.\n" if source else ""
    if (folder / "bench.json").exists():
        (folder / "throughput.png").unlink(missing_ok=True)
    write_json(folder / "bench.json", result)
    write_text(folder / "table.md", markdown(table, run) + settings)
    write_text(folder / "paper.md", markdown(table, run, PAPER) + settings)
    write_text(folder / "paper.csv", comma_separated(table, PAPER))
    if plots and len({row["batch_size"] for row in table}) > 1:
        throughput(folder / "throughput.png", table)
    return result


def plot(table: Sequence[Mapping[str, Any]], row_means: Mapping[str, Sequence[float]], folder: Path) -> None:
    """Write rows.png and passes.png to `folder`, and speed.png if a cost was measured of two methods or more."""
    means_by_row = {label: (range(1, len(means) + 1), means) for label, means in row_means.items()}
    curves(folder / "rows.png", means_by_row, "row of codes where the pass began", "codes per pass")
    shares_of_passes = {row["method"]: shares(row["histogram"]) for row in table}
    curves(folder / "passes.png", shares_of_passes, "codes decided by one pass", "share of passes, %")
    cost = next((c for c in COSTS if sum(row.get(c) is not None for row in table) > 1), None)
    if cost:
        speed(folder / "speed.png", table, cost)


def shares(histogram: Mapping[int, int]) -> tuple[Sequence[float], Sequence[float]]:
    """Return numbers of codes from 1 on, and the share of the passes that decided each number, in percent."""
    codes = range(1, max(map(int, histogram)) + 1)
    return codes, [100 * histogram.get(k, 0) / sum(histogram.values()) for k in codes]


def throughput(path: Path, table: Sequence[Mapping[str, Any]]) -> None:
    """Plot pictures per second against the batch size, a line per method."""
    lines = {}
    for label in dict.fromkeys(row["method"] for row in table):
        rows = [row for row in table if row["method"] == label]
        lines[label] = [row["batch_size"] for row in rows], [row["pictures_per_second"] for row in rows]
    curves(path, lines, "pictures at once", "pictures per second", powers_of_two=True)


def curves(
    path: Path,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    powers_of_two: bool = False,
) -> None:
    """Plot lines, given by label as their x and their y. powers_of_two: those of x are evenly spaced."""
    with plotted(path, x_label, y_label) as axes:
        for i, (label, points) in enumerate(lines.items()):
            axes.plot(*points, f"C{i % 10}.{'-' if i < 10 else '--'}", label=fill(label, 22))
        axes.set_ylim(bottom=0)
        if powers_of_two:
            axes.set_xscale("log", base=2)


def speed(path: Path, table: Sequence[Mapping[str, Any]], cost: str) -> None:
    """Plot the cost against the speed-up, a point per method."""
    better = "higher is better" if cost == "clip" else "lower is better"
    with plotted(path, "speed-up over plain decoding", f"{COLUMNS[cost][0]} ({better})") as axes:
        for i, row in enumerate(table):
            if row.get(cost) is not None:
                style = {"fmt": MARKS[i % len(MARKS)], "color": f"C{i % 10}", "alpha": 0.9, "capsize": 2}
                point = row["speedup"], row[cost], row.get(f"{cost}_spread")
                axes.errorbar(*point, **style, label=fill(row["method"], 22))
        axes.axvline(1, color="grey", linewidth=0.8)


@contextmanager
def plotted(path: Path, x_label: str, y_label: str) -> Iterator[Any]:
    """Yield the axes of a new figure, which needs no display; then write the figure with a legend beside the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    yield axes
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as a PNG; a file at `path` is replaced as a whole."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
