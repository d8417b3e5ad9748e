"""`lanternpp floor`: the time of a step beside that of its linear layers and its attention alone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanternpp.arguments import DrawOptions
from lanternpp.cli import options as opt
from lanternpp.cli.overrides import draws, read
from lanternpp.cli.plots import Plots, plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import Progress, progress_bar
from lanternpp.cli.throughput import Sizes, read_sizes
from lanternpp.dials import ENGINE, SAMPLING
from lanternpp.errors import InputError
from lanternpp.methods import AUTO, BASELINE

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.speed import Entry

Methods = Annotated[
    str,
    typer.Option(
        metavar="A,B,...",
        help='Methods separated by commas, each with its overrides after it, as in "ar, eagle tree=chain-4". Plain AR is '
        "always among them.",
    ),
]
Steps = Annotated[
    int, typer.Option(help="Steps of each method that are timed.", callback=opt.within(1, 10_000))
]
Random = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Random weights in LlamaGen's shape, in place of --model: B, L, XL or tiny."
    ),
]


@draws("method", groups=(ENGINE, SAMPLING))
def floor(
    methods: Methods = f"{BASELINE}, {AUTO}",
    batch_sizes: Sizes = "1",
    steps: Steps = 20,
    random: Random = None,
    output: Annotated[Path, opt.to_folder(help="Where figures go.")] = Path("out/floor"),
    plots: Plots = None,
    as_json: opt.Json = False,
    *,
    options: DrawOptions,
) -> None:
    """Where the time of a step goes: linear layers and attention alone, the rest, and what the machine allows.

    A step in the middle of a picture, of each method at each batch size, in turn. Writes table.md, floor.json and floor.png.
    """
    from lanternpp.evaluation.random_model import check_size, random_model
    from lanternpp.evaluation.speed import parse_methods

    sizes, field = read_sizes(batch_sizes), parse_methods(methods)
    if "batch_size" in options.overrides:
        raise InputError("--batch-size would change nothing here; use --batch-sizes")
    if random is not None:
        check_size(random)
        if options.model != opt.MODEL:
            raise InputError(
                f"--model {options.model} would change nothing beside --random; leave out one of them"
            )
    with_plots = plots_enabled(plots)

    from lanternpp.evaluation import floor as measured
    from lanternpp.nn import checkpoints

    with random_model(random) if random else nullcontext(Path(options.model)) as folder:
        pipe = read(replace(options, model=str(folder)), pictures=False)
        with progress_bar("timing steps") as progress:
            result = measure(pipe, field, sizes, steps, options.overrides, progress)
    checkpoints.write_text(output / "floor.json", json.dumps(result, indent=1) + "\n")
    checkpoints.write_text(output / "table.md", measured.markdown(result["floors"], result))
    if with_plots:
        from lanternpp.evaluation import plots as drawing

        parts = {part: measured.HEADINGS[part] for part in measured.PARTS}
        drawing.save(drawing.floors(result["floors"], parts), output / "floor.png")
    if as_json:
        typer.echo(json.dumps(result))
        return
    shown = [measured.cells(row) for row in result["floors"]]
    show_table(list(measured.HEADINGS.values()), shown, caption=measured.settings_line(result))
    typer.echo(str(output / "table.md"))


def measure(
    pipe: Pipeline,
    field: list[Entry],
    sizes: list[int],
    steps: int,
    overrides: Any,
    progress: Progress | None,
) -> dict[str, Any]:
    """What floor.json holds. InputError where a part of a method is missing."""
    from lanternpp.evaluation.floor import figures, measure_floors, measure_limits
    from lanternpp.pipeline import versions
    from lanternpp.tuning.batch_runner import machine, usual_conditions

    named = [
        replace(entry, label=f"{entry.label} ({pipe.settings(AUTO).method})")
        if entry.method == AUTO
        else entry
        for entry in field
    ]
    rows = measure_floors(pipe, named, sizes, usual_conditions(pipe), overrides, steps, progress)
    like = next(pipe.target.parameters())
    limits = measure_limits(like.device, like.dtype)
    about = {"model": pipe.name, "steps": steps, "machine": machine(pipe), "versions": versions()}
    return about | {"limits": asdict(limits), "floors": figures(rows, limits)}
