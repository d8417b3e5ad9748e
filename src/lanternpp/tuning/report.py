"""A tuning as figures: one JSON object, and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lanternpp.api.options import BASELINE
from lanternpp.api.pipeline import versions
from lanternpp.api.settings import dials_read
from lanternpp.api.tuned import CHOSEN
from lanternpp.evaluation import plots
from lanternpp.trees.search import reaches
from lanternpp.tuning.budget import BudgetChoice
from lanternpp.tuning.run import TUNED, T, Tuner
from lanternpp.tuning.trees import Tuning

MEASURED = ("speedup", "codes_per_pass", "seconds_per_image", "efficiency", "tv_cost", "images")


def tuning_report(
    tuner: Tuner[T], found: T, race: Sequence[Mapping[str, Any]], choice: BudgetChoice | None
) -> dict[str, Any]:
    """Everything that a tuning found. race: rows of figures, or none."""
    measured = {row["method"]: {name: row.get(name) for name in MEASURED} for row in race}
    rows = tuner.rows(found)
    report: dict[str, Any] = {
        "method": tuner.options.method,
        "model": tuner.pipe.name,
        "settings": settings(tuner, found),
        "predicted": rows[TUNED]["speedup"],
        "measured": measured.get(TUNED, {}).get("speedup"),
        "trees": [{"name": name, **row, "measured": measured.get(name)} for name, row in rows.items()],
        "plain": measured.get(BASELINE),
        **tuner.figures(found),
        "machine": tuner.machine(),
        "sampling": asdict(tuner.settings),
        "versions": versions(),
    }
    if choice:
        cost = {"spent": choice.cost.value, "spread": choice.cost.spread, "limit": choice.limit}
        report["budget"] = cost | {"looked": choice.tried}
        report["budget"]["plain"] = asdict(choice.plain) if choice.plain else None
    return report


def settings(tuner: Tuner[T], found: T) -> dict[str, Any]:
    """What becomes the method's default: the tree or the window, and the dials that were asked for or chosen."""
    values = {**tuner.options.given, **tuner.chosen_dials(found)}
    read = dials_read(tuner.settings.proposer, tuner.settings.accept)
    return {name: values[name] for name in CHOSEN if name in read and values.get(name) is not None}


def plot(report: Mapping[str, Any], path: Path) -> Path:
    """Predicted codes per second against nodes: the best tree of every size, and the hand-made ones."""
    made, axes = plots.figure()
    sizes = report["sizes"]
    axes.plot(
        [size["nodes"] for size in sizes],
        [size["codes_per_second"] for size in sizes],
        label="best tree of its size",
    )
    for i, tree in enumerate(report["trees"]):
        axes.plot(
            tree["nodes"], tree["codes_per_second"], plots.MARKS[i % len(plots.MARKS)], color=f"C{i + 1}",
            label=tree["name"],
        )  # fmt: skip
    plain = report["costs"]["plain"]
    axes.axhline(1 / plain, color="grey", linewidth=0.8, label="plain AR")
    axes.set_xlabel("nodes of the draft, the root apart")
    axes.set_ylabel("predicted codes per second")
    axes.set_ylim(bottom=0)
    plots.legend(made, axes)
    return plots.save(made, path)


def kept_nodes(found: Tuning) -> dict[tuple[int, ...], float]:
    """The nodes of the tree found, the root first, with how often a pass keeps each."""
    every = reaches(found.tables.of(found.chosen.shape), found.chosen.shape)
    return {path: every[path] for path in sorted(every)}
