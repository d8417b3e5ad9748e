"""`lanternpp compare`: plain decoding beside a method, with the same prompt, seeds, weights and sampling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import (
    BASELINE,
    DrawOptions,
    EngineDials,
    SamplingDials,
    device_text,
    draft_of,
    drawn_with,
    names,
    with_rule,
)
from lanternpp.cli import options as opt
from lanternpp.util.options import Option
from lanternpp.util.terminal import say, show_table, track

if TYPE_CHECKING:
    from lanternpp.api.calls import Request
    from lanternpp.api.pipeline import Pipeline, Result, Stats

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

    from lanternpp.api.picture import save_png

    pipe = opt.read(options)
    request = partial(pipe.request, prompt, n, seed=seed)
    overrides = {"batch_size": 1, **options.overrides}
    measure_tv = overrides.pop("measure_tv", False)
    drafted = request(method=options.method, **overrides)
    shared = {name: getattr(drafted.settings, name) for name in names(EngineDials, SamplingDials)}
    plain = request(method=BASELINE, **shared)
    pairs, tv_stats = race(pipe, (plain, drafted), runs, measure_tv)
    plain_results, results = zip(*pairs, strict=True)
    if tv_stats and tv_stats.tv_cost is None:
        say("compare", f"the total variation of the rule {tv_stats.settings['accept']} cannot be measured")
    rows = [figures_of(plain_results), figures_of(results, tv_stats)]
    for row in rows:
        row["speedup"] = rows[0]["seconds"] / row["seconds"]
    bound = pipe.bound(pipe.settings(options.method, **overrides))
    stats = results[-1].stats
    picture = render(prompt, (plain_results[-1].images, results[-1].images), rows)
    save_png(picture, path, stats.notes(prompt, seed, stats.images))
    if as_json:
        print(json.dumps(rows[1] | {"methods": rows, "bound": bound, "file": str(path)}))
        return
    show(prompt, rows, bound)
    print(str(path))
    opt.advise(pipe, stats.settings, options)


def race(
    pipe: Pipeline, requests: tuple[Request, Request], runs: int, measure_tv: bool
) -> tuple[list[tuple[Result, Result]], Stats | None]:
    """Time plain decoding and the method in turn, and return the pairs of their results.

    With `measure_tv`, also return the statistics of a further, untimed run that measures tv_cost. All runs have the settings of
    their request, also if another draft would be fitted by now.
    """
    # The first turn of each is the warm-up.
    turns = [(pipe.new_engine(request.settings, timed=True), request) for request in requests] * (1 + runs)
    results = [
        pipe.draw(engine, replace(request, samples={})) for engine, request in track("comparing", turns)
    ]
    pairs = list(zip(results[2::2], results[3::2], strict=True))
    if not measure_tv:
        return pairs, None
    turns.clear()  # to free their engines
    settings = replace(requests[1].settings, measure_tv=True)
    request = replace(requests[1], settings=settings, samples={})
    return pairs, pipe.draw(pipe.new_engine(settings), request).stats


def figures_of(results: Sequence[Result], tv_stats: Stats | None = None) -> dict[str, Any]:
    """Return the figures of a side, the seconds as medians of its runs, which draw the same pictures. tv_stats: of an untimed run."""
    stats = tv_stats or results[-1].stats
    seconds = [result.stats.seconds for result in results]
    medians = {"seconds": median(seconds), "seconds_per_image": median(seconds) / stats.images}
    return stats.to_json() | medians | {"seconds_per_run": seconds}


def cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return seconds and passes per picture, and codes per pass, as text."""
    passes = row["passes"] / row["images"]
    return f"{row['seconds_per_image']:.2f}", f"{passes:.0f}", f"{row['codes_per_pass']:.2f}"


def render(prompt: str, images: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return the comparison as one picture: the images of both sides, and their figures."""
    from lanternpp.api.picture import Panel, comparison

    plain, drafted = rows
    method = with_rule(drafted["method"], drafted["settings"])
    draft = draft_of(drafted["settings"])
    headings = (f"{plain['method']} (plain autoregressive)", f"{method}, {draft}" if draft else method)
    highlights = ("", f"{drafted['speedup']:.2f}x the speed")
    slowest = max(plain["seconds"], drafted["seconds"])
    panels = []
    for row, row_images, heading, highlight in zip(rows, images, headings, highlights, strict=True):
        seconds, passes, codes_per_pass = cells(row)
        lines = (f"{seconds} s per picture", f"{codes_per_pass} codes per pass, {passes} passes per picture")
        shares = (row["seconds"] / slowest, row["codes_per_pass"] / drafted["codes_per_pass"])
        panels.append(Panel(row_images, heading, lines, highlight, shares))
    return comparison(prompt, panels)


def show(prompt: str, rows: Sequence[Mapping[str, Any]], bound: str | None) -> None:
    """Print the figures as a table. bound: a sentence on the bottleneck of passes on this machine."""
    plain, drafted = rows
    runs = len(plain["seconds_per_run"])
    # A ratio far above 1 shows that another program used the machine.
    spread = max(max(row["seconds_per_run"]) / min(row["seconds_per_run"]) for row in rows)
    caption = [f"medians of {runs} runs; slowest / fastest: {spread:.2f}" if runs > 1 else "one run"]
    if drafted["auto"] or drafted["settings"]["fit"]:
        caption.append(drawn_with(drafted["method"], drafted["auto"], drafted["settings"]))
    if bound:
        caption.append(bound)
    caption.append(device_text(plain["settings"]))
    headings = ["method", "seconds / picture", "passes / picture", "codes / pass", "speed-up"]
    lines = [
        [with_rule(row["method"], row["settings"]), *cells(row), f"{row['speedup']:.2f}x"] for row in rows
    ]
    if drafted["tv_cost"] is not None:
        headings.append("TV cost / picture")
        for row, line in zip(rows, lines, strict=True):
            line.append(f"{row['tv_cost'] or 0:.2f}")
    show_table(headings, lines, prompt, bold=(1,), caption="; ".join(caption))
