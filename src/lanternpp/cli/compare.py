"""`lanternpp compare`: plain decoding beside a method, with the same prompt, seeds, weights and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import (
    BASELINE,
    DrawOptions,
    EngineDials,
    SamplingDials,
    draft_of,
    drawn_with,
    names,
    place_of,
    with_rule,
)
from lanternpp.cli import options as opt
from lanternpp.util.options import Option
from lanternpp.util.terminal import Progress, progress_bar, say, show_table

if TYPE_CHECKING:
    from lanternpp.api.calls import Request
    from lanternpp.api.pipeline import Pipeline, Result, Stats
    from lanternpp.engine.decode import Engine

OUTPUT = Path("out/compare.png")


@opt.verb
def compare(
    prompt: opt.Prompt,
    /,
    *,
    n: opt.Count = 1,
    output: Annotated[Path, Option("Where to write.", names=("-o", "--output"), metavar="FILE.png")] = OUTPUT,
    overwrite: opt.Overwrite = False,
    runs: Annotated[int, Option("Timed runs of each side; medians are shown.", ge=1)] = 3,
    as_json: opt.Json = False,
    options: DrawOptions = DrawOptions(),
    seed: opt.Seed = 0,
) -> None:
    """Draw PROMPT twice, by plain decoding and by a method: one PNG with the times under each.

    The runs of the two sides take turns, each side after one untimed warm-up. Pictures are drawn one at a
    time, as in the papers, unless --batch-size says otherwise. --measure-tv draws them once more, untimed.
    """
    path = opt.png_path(output, overwrite)
    opt.check(options)

    from lanternpp.api.picture import notes, save_png

    pipe = opt.read(options)
    request = partial(pipe.request, prompt, n, seed=seed)
    overrides = {"batch_size": 1, **options.overrides}
    measure_tv = overrides.pop("measure_tv", False)
    method = request(method=options.method, **overrides)
    shared = {name: getattr(method.settings, name) for name in names(EngineDials, SamplingDials)}
    with progress_bar("comparing") as progress:
        pairs, measured = race(pipe, (request(method=BASELINE, **shared), method), runs, measure_tv, progress)
    base, side = zip(*pairs, strict=True)
    if measured and measured.tv_cost is None:
        say("compare", f"the total variation of the rule {measured.settings['accept']} cannot be measured")
    rows = [row(base), row(side, measured)]
    for each in rows:
        each["speedup"] = rows[0]["seconds"] / each["seconds"]
    bound = pipe.bound(pipe.settings(options.method, **overrides))
    stats = side[-1].stats
    chunks = notes(prompt, seed, stats.model, stats.settings, stats.versions, stats.images)
    save_png(render(prompt, (base[-1].images, side[-1].images), rows), path, chunks)
    if as_json:
        print(json.dumps(rows[1] | {"methods": rows, "bound": bound, "file": str(path)}))
        return
    show(prompt, rows, bound)
    print(str(path))
    opt.advise(pipe, stats.settings, options)


def race(
    pipe: Pipeline, sides: tuple[Request, Request], runs: int, measure_tv: bool, progress: Progress | None
) -> tuple[list[tuple[Result, ...]], Stats | None]:
    """Pairs of plain decoding's runs and the method's, one of each in turn; and the statistics of a run that was measured.

    All runs of a side have its settings, also where another draft would be fitted by now. Progress is reported between
    runs only, so that the timed ones do nothing else. With `measure_tv`, the method's tv_cost is measured in
    one more run, which draws the same pictures, since measuring takes time.
    """
    done, total = count(), 2 * (runs + 1) + measure_tv
    engines = [pipe.new_engine(side.settings, timed=True) for side in sides]

    def run(engine: Engine, side: Request) -> Result:
        if progress:
            progress(next(done), total)
        return pipe.draw(engine, replace(side, found={}))

    _, *pairs = [tuple(map(run, engines, sides)) for _ in range(1 + runs)]
    if not measure_tv:
        return pairs, None
    engines.clear()
    measured = replace(sides[1], settings=replace(sides[1].settings, measure_tv=True))
    return pairs, run(pipe.new_engine(measured.settings), measured).stats


def row(results: Sequence[Result], measured: Stats | None = None) -> dict[str, Any]:
    """A run's figures, with the medians in place of its seconds: runs differ in these only, as seeds and settings are the same.

    measured: of a run that was not timed.
    """
    stats, runs = measured or results[-1].stats, [result.stats.seconds for result in results]
    medians = {"seconds": median(runs), "seconds_per_image": median(runs) / stats.images}
    return stats.to_json() | medians | {"seconds_per_run": runs}


def figures(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Seconds and passes per picture, and codes per pass, as text."""
    passes = row["passes"] / row["images"]
    return f"{row['seconds_per_image']:.2f}", f"{passes:.0f}", f"{row['codes_per_pass']:.2f}"


def render(prompt: str, images: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """The comparison as one picture: images of both sides, and their rows of figures."""
    from lanternpp.api.picture import Panel, comparison

    base, side = rows
    drafted = ", ".join(
        filter(None, (with_rule(side["method"], side["settings"]), draft_of(side["settings"])))
    )
    headings = (f"{base['method']} (plain autoregressive)", drafted)
    highlights = ("", f"{side['speedup']:.2f}x the speed")
    panels = []
    for each, drawn, heading, highlight in zip(rows, images, headings, highlights, strict=True):
        seconds, passes, per_pass = figures(each)
        lines = (f"{seconds} s per picture", f"{per_pass} codes per pass, {passes} passes per picture")
        slowest = max(base["seconds"], side["seconds"])
        shares = (each["seconds"] / slowest, each["codes_per_pass"] / side["codes_per_pass"])
        panels.append(Panel(drawn, heading, lines, highlight, shares))
    return comparison(prompt, panels)


def show(prompt: str, rows: Sequence[Mapping[str, Any]], bound: str | None) -> None:
    """The figures as a table on stdout. bound: a sentence on the bottleneck of passes on this machine."""
    base, side = rows
    runs = len(base["seconds_per_run"])
    # slowest over fastest run: far above 1 where something else used the machine
    spread = max(max(each["seconds_per_run"]) / min(each["seconds_per_run"]) for each in rows)
    caption = [f"medians of {runs} runs; slowest / fastest: {spread:.2f}" if runs > 1 else "one run"]
    if side["auto"] or side["settings"]["fit"]:
        caption.append(drawn_with(side["method"], side["auto"], side["settings"]))
    caption += [bound] if bound else []
    caption.append(place_of(base["settings"]))
    headings = ["method", "seconds / picture", "passes / picture", "codes / pass", "speed-up"]
    cells = [
        [with_rule(each["method"], each["settings"]), *figures(each), f"{each['speedup']:.2f}x"]
        for each in rows
    ]
    if side["tv_cost"] is not None:
        headings.append("TV cost / picture")
        for each, line in zip(rows, cells, strict=True):
            line.append(f"{each['tv_cost'] or 0:.2f}")
    show_table(headings, cells, prompt, bold=(1,), caption="; ".join(caption))
