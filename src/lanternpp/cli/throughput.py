"""`lanternpp throughput`: pictures per second by batch size, plain, drafted, and with the draft fitted to the machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lanternpp.api.options import DIALS, DrawOptions
from lanternpp.cli import old_options as opt
from lanternpp.cli.overrides import check, draws, read
from lanternpp.cli.plots import Plots, plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar
from lanternpp.errors import InputError
from lanternpp.util import files

MOST = 1024  # pictures at once

Sizes = Annotated[str, typer.Option(metavar="A,B,...", help="Pictures at once, separated by commas.")]
Rounds = Annotated[
    int, typer.Option(help="How often each way to draw is timed.", callback=opt.within(1, 1000))
]
Folder = Annotated[
    Path, opt.to_folder(help="Where figures go. The same command goes on where it was stopped.")
]
Restart = Annotated[bool, typer.Option("--restart", help="Measure everything again.")]


@draws()
def throughput(
    batch_sizes: Sizes = "1,2,4,8,16",
    rounds: Rounds = 3,
    prompts: opt.Prompts = None,
    output: Folder = Path("out/throughput"),
    restart: Restart = False,
    plots: Plots = None,
    as_json: opt.Json = False,
    *,
    options: DrawOptions,
    seed: opt.Seed = 0,
) -> None:
    """Pictures per second by batch size: plain AR, a method, and the method with the draft that is fastest here at each size.

    The three ways are timed in turn, each with a batch that is kept full. Writes table.md, throughput.json and throughput.png.
    """
    sizes = read_sizes(batch_sizes)
    for name, remedy in (("batch_size", "--batch-sizes"), ("measure_tv", "bench --measure-tv")):
        if name in options.overrides:
            raise InputError(f"{DIALS[name].option} would change nothing here; use {remedy}")
    check(options)
    with_plots = plots_enabled(plots)

    from lanternpp.api.model import model_folder
    from lanternpp.api.results import drawn_with
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.tuning import throughput as measured
    from lanternpp.tuning.batch_runner import usual_conditions

    given = read_prompts(prompts, model_folder(options.model)) if prompts else None
    pipe = read(options, pictures=False)
    settings = pipe.settings(options.method, **{"batch_size": 1, **options.overrides})
    auto, method = pipe.chosen(options.method).why, settings.method
    conditions = given or usual_conditions(pipe)
    for condition in conditions:
        pipe.target.check(condition)
    bench = measured.Throughput(pipe, settings, sizes, conditions, output, seed, restart)
    with progress_bar("drawing") as tell:
        rates = bench.run(rounds, tell)
    result = bench.facts | {"auto": auto, "rounds": rounds, "rates": [asdict(rate) for rate in rates]}
    files.write_text(output / "throughput.json", json.dumps(result, indent=1) + "\n")
    files.write_text(output / "table.md", measured.markdown(rates, method))
    if with_plots:
        measured.plot(rates, method, output / "throughput.png")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"method: {drawn_with(method, auto)}")
        show(rates, method)


def read_sizes(text: str) -> list[int]:
    """Batch sizes, ascending. Raises InputError."""
    try:
        sizes = sorted({int(word) for word in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= MOST:
        raise InputError(
            f"--batch-sizes {text!r} is no list of sizes; use whole numbers from 1 to {MOST} parted by commas"
        )
    return sizes


def show(rates: list[Any], method: str) -> None:
    """The figures on stdout, a line for each way at each size."""
    from lanternpp.tuning.throughput import FITTED, OWN, PLAIN, figures, named

    ways = {PLAIN: "plain AR", OWN: method, FITTED: "fitted"}
    rows = [(str(rate.rows), ways[rate.kind], named(rate).strip("`"), *figures(rate)) for rate in rates]
    headings = ("batch", "way", "draws", "pictures/s", "codes per pass", "speed-up")
    show_table(headings, rows, left=(1, 2))
