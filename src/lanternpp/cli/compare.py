"""`lanternpp compare`: plain AR beside a method, with the same prompt, seeds, weights and sampling."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import BASELINE, DrawOptions, EngineDials, SamplingDials, names
from lanternpp.cli import options as opt
from lanternpp.cli.output import png_path
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import Progress, progress_bar
from lanternpp.util.options import Option

if TYPE_CHECKING:
    from lanternpp.api.pipeline import Result, Stats

OUTPUT = Path("out/compare.png")
Runs = Annotated[int, Option("Timed runs of each side; medians are shown.", ge=1)]


@opt.verb
def compare(
    prompt: opt.Prompt,
    /,
    *,
    n: opt.Count = 1,
    output: opt.Output = OUTPUT,
    overwrite: opt.Overwrite = False,
    runs: Runs = 3,
    as_json: opt.Json = False,
    options: DrawOptions = DrawOptions(),
    seed: opt.Seed = 0,
) -> None:
    """Draw PROMPT twice, by plain AR and by a method: one PNG with the times under each.

    The runs of the two sides take turns, each side after one untimed warm-up. Pictures are drawn one at a
    time, as in the papers, unless --batch-size says otherwise. --measure-tv draws them once more, untimed.
    """
    path = png_path(output or OUTPUT, overwrite)
    opt.check(options)

    from lanternpp.api.picture import notes, save_png

    pipe = opt.read(options, pictures=False)  # drawing checks the output

    def draw(name: str, **settings: Any) -> Result:
        return pipe(prompt, n=n, seed=seed, method=name, **settings)

    overrides = {"batch_size": 1, **options.overrides}
    measure_tv = overrides.pop("measure_tv", False)
    with progress_bar("comparing") as progress:
        base, side = race(draw, options.method, overrides, runs, measure_tv, progress)
    speedup = base.seconds / side.seconds
    bound = pipe.bound(pipe.settings(options.method, **overrides))
    stats = side.last.stats
    chunks = notes(prompt, seed, stats.model, stats.settings, stats.versions, stats.images)
    save_png(render(prompt, base, side, speedup), path, chunks)
    if as_json:
        rows = [base.row() | {"speedup": 1.0}, side.row() | {"speedup": speedup}]
        print(json.dumps(rows[1] | {"methods": rows, "bound": bound, "file": str(path)}))
        return
    show(prompt, base, side, speedup, bound)
    print(str(path))


@dataclass
class Side:
    """One side's timed runs; they differ in seconds only, since seeds and settings are the same."""

    results: list[Result] = field(default_factory=list)
    measured: Stats | None = None  # of a run that was not timed

    @property
    def last(self) -> Result:
        """The latest run."""
        return self.results[-1]

    @property
    def seconds(self) -> float:
        """Median wall clock of a run."""
        return median(result.stats.seconds for result in self.results)

    @property
    def spread(self) -> float:
        """Slowest run over fastest: far above 1 where something else used the machine."""
        seconds = [result.stats.seconds for result in self.results]
        return max(seconds) / min(seconds)

    def row(self) -> dict[str, Any]:
        """A run's figures, with the medians in place of its seconds."""
        stats = self.measured or self.last.stats
        return stats.to_json() | {
            "seconds": self.seconds,
            "seconds_per_image": self.seconds / stats.images,
            "seconds_per_run": [result.stats.seconds for result in self.results],
        }

    def figures(self) -> tuple[str, str, str]:
        """Seconds and passes per picture, and codes per pass, as text."""
        stats = self.last.stats
        passes = stats.passes / stats.images
        return f"{self.seconds / stats.images:.2f}", f"{passes:.0f}", f"{stats.codes_per_pass:.2f}"


def race(
    draw: Callable[..., Result],
    method: str,
    options: dict[str, Any],
    runs: int,
    measure_tv: bool,
    progress: Progress | None,
) -> tuple[Side, Side]:
    """Plain AR's runs and the method's, one of each in turn.

    The method's warm-up resolves the shared settings, and plain AR gets the same. Progress is reported
    between runs only, so that the timed ones do nothing else. With `measure_tv`, the method's tv_cost is measured in
    one more run, which draws the same pictures, since measuring takes time.
    """
    report = progress or (lambda done, total: None)
    total = 2 * (runs + 1) + measure_tv
    report(0, total)
    settings = draw(method, **options).stats.settings
    same = {name: settings[name] for name in names(EngineDials, SamplingDials)}
    report(1, total)
    draw(BASELINE, **same)
    report(2, total)
    base, side = Side(), Side()
    for run in range(runs):
        base.results.append(draw(BASELINE, **same))
        report(3 + 2 * run, total)
        side.results.append(draw(method, **options))
        report(4 + 2 * run, total)
    if measure_tv:
        side.measured = draw(method, **options, measure_tv=True).stats
        report(total, total)
    return base, side


def render(prompt: str, base: Side, side: Side, speedup: float) -> Any:
    """The comparison as one picture."""
    from lanternpp.api.picture import Panel, comparison
    from lanternpp.api.results import draft_of

    stats = side.last.stats
    drafted = ", ".join(filter(None, (stats.method, draft_of(stats.settings))))
    panels = []
    for each, heading, highlight in (
        (base, f"{base.last.stats.method} (plain autoregressive)", ""),
        (side, drafted, f"{speedup:.2f}x the speed"),
    ):
        seconds, passes, per_pass = each.figures()
        figures = (f"{seconds} s per picture", f"{per_pass} codes per pass, {passes} passes per picture")
        codes = each.last.stats.codes_per_pass
        shares = (each.seconds / max(base.seconds, side.seconds), codes / side.last.stats.codes_per_pass)
        panels.append(Panel(each.last.images, heading, figures, highlight, shares))
    return comparison(prompt, panels)


def show(prompt: str, base: Side, side: Side, speedup: float, bound: str | None) -> None:
    """The figures as a table on stdout. bound: what bounds passes on this machine, in a sentence."""
    from lanternpp.api.results import drawn_with

    runs, spread = len(base.results), max(base.spread, side.spread)
    caption = f"medians of {runs} runs; slowest / fastest: {spread:.2f}" if runs > 1 else "one run"
    stats = side.last.stats
    if stats.auto or stats.settings["fit"]:
        caption += f"; {drawn_with(stats.method, stats.auto, stats.settings)}"
    if bound:
        caption += f"; {bound}"
    caption += f"; {base.last.stats.settings['dtype']} on {base.last.stats.settings['device']}"
    headings = ["method", "seconds / picture", "passes / picture", "codes / pass", "speed-up"]
    rows = [
        [base.last.stats.method, *base.figures(), "1.00x"],
        [side.last.stats.method, *side.figures(), f"{speedup:.2f}x"],
    ]
    if side.measured is not None:
        headings.append("TV cost / picture")
        rows[0].append("0.00")
        rows[1].append(f"{side.measured.tv_cost:.2f}")
    show_table(headings, rows, prompt, bold=(1,), caption=caption)
