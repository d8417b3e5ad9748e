"""Pictures per second by batch size: plain decoding, a method with the model's own draft, and with the draft fitted to the machine.

They take turns at the same prompts, a batch of each kept full, so that the machine is the same for all of them. Each turn
is written down at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lanternpp.api.fit.choice import plain_settings
from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline, versions
from lanternpp.evaluation.report import markdown_table
from lanternpp.tuning.batch_runner import BatchRunner, Conditions, machine
from lanternpp.tuning.journal import Journal

PLAIN, OWN, FITTED = "plain", "own", "fitted"
WARM = 3  # steps before the first turn of a batch


@dataclass(frozen=True)
class Rate:
    """One way to draw at one batch size; figures are medians over the rounds."""

    rows: int
    kind: str  # PLAIN, OWN or FITTED
    method: str
    tree: str | None
    pictures: float  # per second
    codes: float  # per pass, the prefills among the passes
    speedup: float  # over plain decoding at the same size, round by round


class Throughput:
    """Rounds of a method at several batch sizes, logged in a folder, from which a stopped run is resumed unless `restart`.

    Raises InputError where a part of the method is missing, or the folder holds something else.
    """

    def __init__(
        self,
        pipe: Pipeline,
        settings: Settings,
        rows: Sequence[int],
        conditions: Conditions,
        folder: Path,
        seed: int = 0,
        restart: bool = False,
    ):
        self.pipe, self.settings, self.rows = pipe, settings, rows
        self.conditions, self.seed = conditions, seed
        facts: dict[str, Any] = {
            "tuned": f"{settings.method}, throughput",
            "model": pipe.name,
            "weights": pipe.weights,
        }
        facts |= {"settings": asdict(settings), "prompts": list(conditions), "seed": seed}
        self.facts = facts | {"machine": machine(pipe), "versions": versions()}
        self.journal = Journal(folder, self.facts, restart)

    def ways(self, rows: int) -> dict[str, Settings]:
        """The three ways to draw at a size."""
        own = replace(self.settings, batch_size=rows, fit=False)
        fitted = self.pipe.fit(replace(self.settings, batch_size=rows))
        return {PLAIN: plain_settings(own), OWN: own, FITTED: replace(fitted, fit=False)}

    def run(self, rounds: int, progress: Callable[[int, int], None] | None = None) -> list[Rate]:
        """Every way at every size; the fitted draft is not drawn again where it is one of the others."""
        made: list[Rate] = []
        named = {rows: self.ways(rows) for rows in self.rows}
        every = {rows: list(dict.fromkeys(ways.values())) for rows, ways in named.items()}
        done, total = 0, rounds * sum(rows * len(ways) for rows, ways in every.items())
        for rows, ways in every.items():
            batches: dict[Settings, BatchRunner] = {}
            turns: dict[Settings, list[dict[str, float]]] = {way: [] for way in ways}
            for turn in range(rounds):
                for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                    if progress:
                        progress(done, total)
                    key = {"rows": rows, "method": way.method, "tree": way.tree, "round": turn}
                    turns[way].append(self.journal.once(key, partial(self._turn, batches, way)))
                    done += rows
            made += [self._rate(kind, way, turns) for kind, way in named[rows].items()]
        return made

    def _turn(self, batches: dict[Settings, BatchRunner], way: Settings) -> dict[str, float]:
        if way not in batches:
            engine = self.pipe.new_engine(way)
            batches[way] = BatchRunner(engine, self.conditions, self.seed, self.pipe.images)
            for _ in range(WARM):
                batches[way].timed_step()
        return batches[way].turn()

    def _rate(self, kind: str, way: Settings, turns: dict[Settings, list[dict[str, float]]]) -> Rate:
        plain = [turn["codes"] / turn["seconds"] for turn in turns[plain_settings(way)]]
        codes_per_second = [turn["codes"] / turn["seconds"] for turn in turns[way]]
        length = self.pipe.target.length
        per_pass = sum(turn["codes"] for turn in turns[way]) / sum(turn["passes"] for turn in turns[way])
        gain = median(one / other for one, other in zip(codes_per_second, plain, strict=True))
        return Rate(
            way.batch_size, kind, way.method, way.tree, median(codes_per_second) / length, per_pass, gain
        )


def markdown(rates: Sequence[Rate], method: str) -> str:
    """A row per batch size."""
    heads = ["batch", "plain AR, pictures/s", f"`{method}`, pictures/s", "codes per pass", "speed-up"]
    heads += ["fitted to this machine", "pictures/s", "codes per pass", "speed-up"]
    lines = []
    for rows in dict.fromkeys(rate.rows for rate in rates):
        plain, own, fitted = (rate for rate in rates if rate.rows == rows)
        lines.append([str(rows), f"{plain.pictures:.3g}", *figures(own), named(fitted), *figures(fitted)])
    return markdown_table(heads, lines, left=(5,))


def figures(rate: Rate) -> list[str]:
    """Pictures per second, codes per pass, speed-up."""
    return [f"{rate.pictures:.3g}", f"{rate.codes:.2f}", f"{rate.speedup:.2f}x"]


def named(rate: Rate) -> str:
    """What is drafted, in a word or two."""
    if rate.tree is None:
        return f"`{rate.method}`"
    return f"a tree of {rate.tree.count('[') - 1}" if rate.tree.startswith("[") else f"`{rate.tree}`"


def plot(rates: Sequence[Rate], method: str, path: Path) -> Path:
    """Pictures per second, and speed-up over plain decoding, by batch size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from lanternpp.evaluation.plots import save

    made = Figure(figsize=(9, 4), dpi=130, layout="constrained")
    FigureCanvasAgg(made)
    labels = {PLAIN: "plain AR", OWN: f"{method}, the model's own draft", FITTED: f"{method}, fitted"}
    marks = {PLAIN: "s-", OWN: "o--", FITTED: "D-"}
    panels = made.subplots(1, 2)
    for axes, field, says in zip(
        panels, ("pictures", "speedup"), ("pictures per second", "speed-up over plain AR"), strict=True
    ):
        for i, (kind, label) in enumerate(labels.items()):
            of_kind = [rate for rate in rates if rate.kind == kind]
            sizes, values = [rate.rows for rate in of_kind], [getattr(rate, field) for rate in of_kind]
            axes.plot(sizes, values, marks[kind], color=f"C{i}", label=label, markersize=5, alpha=0.85)
            for rate in of_kind if field == "speedup" and kind == FITTED else []:
                axes.annotate(
                    named(rate).strip("`"),
                    (rate.rows, rate.speedup),
                    xytext=(0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sorted({rate.rows for rate in rates}), [str(n) for n in sorted({r.rows for r in rates})]
        )
        axes.set_xlabel("pictures at once")
        axes.set_ylabel(says)
        axes.margins(x=0.1, y=0.12)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(fontsize=8, frameon=False)
    return save(made, path)
