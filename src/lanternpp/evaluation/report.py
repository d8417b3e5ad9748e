"""A race as figures: one row per method, a Markdown table, one JSON object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from lanternpp.api.options import BASELINE
from lanternpp.engine.stopwatch import PHASES
from lanternpp.evaluation.race import Turn

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
    "frechet": "Fréchet",
    "precision": "precision",
    "recall": "recall",
    "prompt_accuracy": "prompt accuracy",
    "clip": "CLIP",
}
WIDE = ("where", "precision", "recall")  # not for a terminal
BATCHES = ("batch_size", "draft", "pictures_per_second")  # shown where batch sizes are compared


def rows(
    turns: Sequence[Turn], run: Mapping[str, Any], quality: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """One row per method of a run, in its order; `quality` holds further figures by label.

    Seconds are medians over turns, their spread the distance between the quartiles.
    """
    plain = figures([t for t in turns if t.label == BASELINE])["seconds_per_image"]
    made = []
    for label, settings in run["methods"].items():
        row = figures([t for t in turns if t.label == label])
        speedup = plain / row["seconds_per_image"]
        ratios = {"speedup": speedup, "efficiency": speedup / row["codes_per_pass"]}
        about = {"method": label, "model": run["model"], "batch_size": settings["batch_size"]}
        about["draft"] = draft_name(settings)
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
        "seconds_per_image": median(seconds),
        "seconds_quartiles": [quarters[0], quarters[2]],
        "phases": {phase: sum(t.phases[phase] for t in turns) / total for phase in PHASES},
        "accepted_per_pass": every,
        "histogram": dict(sorted(Counter(every).items())),
        "tv_cost": fmean(tv_cost) if tv_cost else None,
        "tv_cost_images": len(tv_cost),
    }


def draft_name(settings: Mapping[str, Any]) -> str:
    """What a method drafts, in a word or two."""
    tree = settings.get("tree")
    if tree is None:
        return f"window {settings['window']}" if settings.get("window") else "none"
    return f"a tree of {tree.count('[') - 1}" if tree.startswith("[") else str(tree)


def by_row(turns: Sequence[Turn], width: int) -> dict[str, list[float]]:
    """Mean codes decided by the passes that began in each row of the image, by label."""
    table: dict[str, list[float]] = {}
    for label in dict.fromkeys(turn.label for turn in turns):
        began: dict[int, list[int]] = {}
        for turn in turns:
            if turn.label != label:
                continue
            for accepted in turn.accepted:
                place = 0
                for count in accepted:
                    if place:  # the prefill decides one code, whatever the method
                        began.setdefault(place // width, []).append(count)
                    place += count
        table[label] = [fmean(began.get(row, [0])) for row in range(max(began, default=-1) + 1)]
    return table


def cell(row: Mapping[str, Any], column: str, brief: bool = False) -> str:
    """One figure of a row as text, with its spread unless brief; a dash where it was not measured."""
    if column in ("method", "draft"):
        return f"`{row[column]}`"
    if column == "where":
        return " / ".join(f"{100 * row['phases'][phase]:.0f}" for phase in PHASES)
    value = row.get(column)
    if value is None:
        return "-"
    if column == "seconds_per_image" and not brief:
        low, high = row["seconds_quartiles"]
        return f"{value:.2f} ({low:.2f}-{high:.2f})"
    if column == "speedup":
        return f"{value:.2f}x"
    if column == "batch_size":
        return str(value)
    if column in ("tv_per_code", "pictures_per_second"):
        return f"{value:.3g}"
    if column == "prompt_accuracy":
        return f"{100 * value:.0f} %"
    if column == "frechet" and row.get("frechet_spread") is not None and not brief:
        return f"{value:.2f} ± {row['frechet_spread']:.2f}"
    return f"{value:.2f}"


def columns(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns that some row has a figure for; those of `BATCHES` only where batch sizes differ."""
    known = [c for c in HEADINGS if c == "where" or any(row.get(c) is not None for row in table)]
    one_size = len({row["batch_size"] for row in table}) == 1
    return [c for c in known if not (one_size and c in BATCHES)]


def markdown(table: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """The table, with the settings it holds for under it."""
    shown = columns(table)
    rows = [[cell(row, c) for c in shown] for row in table]
    return f"{markdown_table([HEADINGS[c] for c in shown], rows)}\n{settings_line(table, run)}\n"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows under headings; left: columns of words."""
    rule = ["---" if place in left else "--:" for place in range(len(headings))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rule, *rows))


def counts(numbers: Iterable[int]) -> str:
    """A count that all share, or the least and the greatest."""
    found = sorted(set(numbers))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def settings_line(table: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """What the figures hold for, in one sentence."""
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
