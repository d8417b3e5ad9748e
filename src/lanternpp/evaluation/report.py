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
from lanternpp.evaluation.race import Turn
from lanternpp.util.files import replacing

QUALITY = {
    "frechet": "Fréchet",
    "precision": "precision",
    "recall": "recall",
    "prompt_accuracy": "prompt accuracy",
    "clip": "CLIP",
}
HEADINGS = {
    "method": "method",
    "batch_size": "batch",
    "draft": "draft",
    "pictures_per_second": "pictures per s",
    "codes_per_pass": "codes per pass",
    "seconds_per_image": "s per picture",
    "speedup": "speed-up",
    "efficiency": "efficiency",
    "where": "draft / pass / verify / rest, %",
    "tv_cost": "TV cost",
    "tv_per_code": "TV per code",
    **QUALITY,
}
PAPER = {  # the columns of LANTERN++'s tables (arXiv 2502.06352): means over pictures, the prefill not among the passes
    "method": "method",
    "draft": "draft",
    "latency": "latency, s",
    "latency_speedup": "speed-up",
    "step_compression": "step compression",
    **QUALITY,
}
FORMATS = {  # others have two decimals
    "method": "`{}`",
    "draft": "{}",
    "batch_size": "{}",
    "speedup": "{:.2f}x",
    "latency_speedup": "{:.2f}x",
    "step_compression": "{:.2f}x",
    "tv_per_code": "{:.3g}",
    "pictures_per_second": "{:.3g}",
    "prompt_accuracy": "{:.0%}",
}
WIDE = ("where", "precision", "recall")  # not for a terminal
BATCHES = ("batch_size", "draft", "pictures_per_second")  # shown where batch sizes are compared
COSTS = ("frechet", "clip", "tv_cost")  # the first one measured stands on the plot of speed against quality
MARKS = "os^"  # so that labels of one colour differ


def rows(
    turns: Sequence[Turn], run: Mapping[str, Any], quality: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """One row per method of a run, in its order; `quality` holds further figures by label.

    Seconds are medians over turns, their spread the distance between the quartiles.
    """
    plain = figures([t for t in turns if t.label == BASELINE])
    made = []
    for label, settings in run["methods"].items():
        mine = [t for t in turns if t.label == label]
        row = figures(mine)
        speedup = plain["seconds_per_image"] / row["seconds_per_image"]
        ratios = {"speedup": speedup, "efficiency": speedup / row["codes_per_pass"]}
        ratios["latency_speedup"] = plain["latency"] / row["latency"]
        batch = settings["batch_size"]
        about = {"method": label, "model": run["model"], "batch_size": batch}
        about["steps"] = sum(steps(turn.accepted, batch) for turn in mine)
        draft = draft_of(settings) or "none"
        about["draft"] = f"{draft}, fitted" if settings["fit"] else draft
        versions = {"settings": settings, "versions": run["versions"]}
        made.append(about | row | ratios | dict(quality.get(label, {})) | versions)
    return made


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """The figures of one method's turns."""
    pictures = [accepted for turn in turns for accepted in turn.accepted]
    seconds = [turn.seconds / len(turn.accepted) for turn in turns]
    every = [count for accepted in pictures for count in accepted]
    total = sum(turn.seconds for turn in turns)
    tv_cost = [value for turn in turns for value in turn.tv_cost or []]
    quarters = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "images": len(pictures),
        "codes": sum(every),
        "passes": len(every),
        "codes_per_pass": sum(every) / len(every),
        "seconds": total,
        "pictures_per_second": len(pictures) / total,
        "latency": total / len(pictures),
        "step_compression": fmean(sum(decided[1:]) / max(1, len(decided) - 1) for decided in pictures),
        "seconds_per_image": median(seconds),
        "seconds_quartiles": [quarters[0], quarters[2]],
        "phases": {phase: sum(t.phases[phase] for t in turns) / total for phase in PHASES},
        "accepted_per_pass": every,
        "histogram": dict(sorted(Counter(every).items())),
        "tv_cost": fmean(tv_cost) if tv_cost else None,
        "tv_cost_images": len(tv_cost),
    }


def steps(accepted: Sequence[Sequence[int]], batch: int) -> int:
    """Steps of an engine with `batch` slots in which pictures were drawn: each takes the slot that is free first."""
    ends = [0] * batch
    for decided in accepted:
        heapreplace(ends, ends[0] + len(decided) - 1)  # its first entry is the prefill
    return max(ends)


def by_row(turns: Sequence[Turn], width: int) -> dict[str, list[float]]:
    """Mean codes decided by the passes that began in each row of the image, by label; NaN where none began."""
    began: dict[str, dict[int, list[int]]] = {turn.label: {} for turn in turns}
    for turn in turns:
        for accepted in turn.accepted:
            # Without the prefill, which decides one code whatever the method.
            for place, count in zip(accumulate(accepted), accepted[1:], strict=False):
                began[turn.label].setdefault(place // width, []).append(count)
    return {
        label: [fmean(rows.get(row, [math.nan])) for row in range(max(rows, default=-1) + 1)]
        for label, rows in began.items()
    }


def cell(row: Mapping[str, Any], column: str, brief: bool = False) -> str:
    """One figure of a row as text, with its spread unless brief; a dash where it was not measured."""
    if column == "where":
        return " / ".join(f"{100 * row['phases'][phase]:.0f}" for phase in PHASES)
    if row.get(column) is None:
        return "-"
    text = FORMATS.get(column, "{:.2f}").format(row[column]).replace("%", " %")
    if column == "seconds_per_image" and not brief:
        text += " ({:.2f}-{:.2f})".format(*row["seconds_quartiles"])
    if column == "frechet" and row.get("frechet_spread") is not None and not brief:
        text += f" ± {row['frechet_spread']:.2f}"
    return text


def columns(table: Sequence[Mapping[str, Any]], headings: Mapping[str, str] = HEADINGS) -> list[str]:
    """The columns that some row has a figure for; those of `BATCHES` only where batch sizes differ, drafts also where one was fitted."""
    known = [c for c in headings if c == "where" or any(row.get(c) is not None for row in table)]
    if len({row["batch_size"] for row in table}) > 1:
        return known
    fitted = any(row["settings"]["fit"] for row in table)
    return [c for c in known if c not in BATCHES or (c == "draft" and fitted)]


def comma_separated(table: Sequence[Mapping[str, Any]], headings: Mapping[str, str]) -> str:
    """The figures of the columns as CSV, not rounded, under their names in bench.json."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(table, headings), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def markdown(
    table: Sequence[Mapping[str, Any]], run: Mapping[str, Any], headings: Mapping[str, str] = HEADINGS
) -> str:
    """The table in Markdown, with the settings it holds for under it."""
    shown = columns(table, headings)
    rule = ["---", *["--:"] * (len(shown) - 1)]
    lines = [[headings[c] for c in shown], rule, *([cell(row, c) for c in shown] for row in table)]
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{rows}\n{settings_line(table, run)}\n"


def counts(numbers: Iterable[int]) -> str:
    """A count that all share, or the least and the greatest."""
    found = sorted(set(numbers))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def settings_line(table: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The settings and the machine of the figures, in one sentence."""
    base = run["methods"][BASELINE]
    images = counts(row["images"] for row in table)
    tv_cost = counts(row["tv_cost_images"] for row in table if row["tv_cost"])
    return (
        f"{run['model']}, {images} pictures of {len(run['prompts'])} prompts per method, "
        f"{counts(row['batch_size'] for row in table)} at a time, methods taking turns; medians, quartiles in brackets. "
        f"cfg {base['cfg']:g}, temperature {base['temperature']:g}, top-k {base['top_k']}, top-p {base['top_p']:g}; "
        f"{run['dtype']}, {'compiled' if base['compile'] else 'not compiled'}, {run['device']}, "
        f"{run['threads']} threads, torch {run['versions']['torch']}."
        + (f" TV cost: mean of {tv_cost} pictures." if tv_cost else "")
    )


def plot(table: Sequence[Mapping[str, Any]], rows: Mapping[str, Sequence[float]], folder: Path) -> None:
    """speed.png, rows.png and passes.png in `folder`; those that the figures allow."""
    cost = next((c for c in COSTS if sum(row.get(c) is not None for row in table) > 1), None)
    drawn = {
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
    for name, figure in drawn.items():
        save_figure(figure, folder / f"{name}.png")


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


def save_figure(fig: Any, path: Path) -> None:
    """The figure as a PNG, written whole."""
    with replacing(path) as temporary:
        fig.savefig(temporary, format="png")
