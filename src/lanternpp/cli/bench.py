"""`lanternpp bench`: methods side by side over prompts and seeds, in seconds, codes per pass and quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanternpp.arguments import DrawOptions
from lanternpp.cli import options as opt
from lanternpp.cli.overrides import draws, read
from lanternpp.cli.plots import Plots, plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.dials import ENGINE, SAMPLING
from lanternpp.errors import InputError
from lanternpp.jsonfile import read_object

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.quality import Quality
    from lanternpp.evaluation.speed import Race

OUTPUT = Path("out/bench")
DEFAULT_METHODS = ("ar", "eagle", "eagle2", "lantern", "lantern++", "jacobi-coupled", "lantern-jacobi")

Methods = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help='Methods separated by commas, each with its overrides after it: "eagle, lantern++ k=10 lambda=5". '
        f"Plain AR is always among them. Default: those of {', '.join(DEFAULT_METHODS)} that the model has a drafter for.",
    ),
]
Folder = Annotated[Path, opt.to_folder(help="Where figures, plots and pictures go.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure/--no-measure",
        help="Measure tv_spent on one picture per prompt, drawn again and not timed.",
    ),
]
JudgeIt = Annotated[
    bool, typer.Option("--quality/--no-quality", help="Quality figures.", rich_help_panel=opt.PANEL_QUALITY)
]


@draws("size", "method", groups=(ENGINE, SAMPLING))
def bench(
    prompts: opt.Prompts = None,
    methods: Methods = None,
    n: opt.Count = 4,
    output: Folder = OUTPUT,
    resume: Resume = False,
    as_json: opt.Json = False,
    measure: Measure = True,
    plots: Plots = None,
    quality: JudgeIt = True,
    reference: opt.Reference = None,
    features: opt.Features = None,
    clip: opt.Clip = None,
    *,
    options: DrawOptions,
    seed: opt.Seed = 0,
) -> None:
    """Compare methods on one model: -n pictures per prompt and method, the methods taking turns.

    Writes table.md, bench.json, plots and every picture to the folder. Interrupt it when you like: --resume
    goes on. One picture at a time unless --batch-size says otherwise.
    """
    from lanternpp.evaluation.speed import parse_methods

    named = None if methods is None else parse_methods(methods)
    with_plots = plots_enabled(plots)

    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.evaluation.speed import Race
    from lanternpp.models import model_folder

    prompt_list = read_prompts(prompts, model_folder(options.model))
    pipe = read(options)
    field = named or parse_methods(", ".join(default_methods(pipe)))
    race = Race(pipe, field, prompt_list, n, seed, dict(options.overrides), measure)
    measurer = make_measurer(pipe, n * len(prompt_list), reference, features, clip) if quality else None
    table = run(race, measurer, output, resume, with_plots)
    if as_json:
        typer.echo(json.dumps(table))
        return
    show(table)
    typer.echo(str(output / "table.md"))


def default_methods(pipe: Pipeline) -> list[str]:
    """The methods that are compared by default; says on stderr which the model lacks a drafter or a codebook for."""
    ready = [name for name in DEFAULT_METHODS if pipe.can_draft(pipe.settings(name))]
    lacking = [name for name in DEFAULT_METHODS if name not in ready]
    if lacking:
        say(
            "bench", f"left out, since {pipe.name} lacks a network or codebook for them: {', '.join(lacking)}"
        )
    return ready


def make_measurer(
    pipe: Any, count: int, reference: Path | None, features: str | None, clip: str | None
) -> Quality | None:
    """What measures `count` pictures of each method; made before any is drawn, so that mistakes are reported first.

    None where no option asks for it and the model has no classifier or the pictures are too few.
    """
    from lanternpp.evaluation.quality import LEAST, Quality

    if not (reference or features or clip):
        if count < LEAST or not (pipe.folder / "judge").is_dir():
            return None
    elif count < LEAST:
        raise InputError(
            f"{count} pictures of each method are too few to measure; at least {LEAST} are needed: "
            "raise -n, or give more prompts"
        )
    device = pipe.device
    return Quality.for_model(pipe.folder, reference, features, clip, device)


def run(race: Race, measurer: Quality | None, folder: Path, resume: bool, plots: bool) -> dict[str, Any]:
    """Race, measure the pictures, and write all files; returns the content of bench.json."""
    from PIL import Image

    from lanternpp.evaluation import report
    from lanternpp.evaluation.speed import RUN
    from lanternpp.nn import checkpoints

    with progress_bar("racing") as progress:
        turns = race.run(folder, resume, progress)
    quality: dict[str, dict[str, float]] = {}
    if measurer:
        with progress_bar("measuring") as progress:
            for i, entry in enumerate(race.field):
                if progress:
                    progress(i, len(race.field))
                of_method = [turn for turn in turns if turn.label == entry.label]
                images = [
                    Image.open(folder / name).convert("RGB") for turn in of_method for name in turn.files
                ]
                drawn_prompts = [race.prompts[turn.prompt] for turn in of_method for _ in turn.files]
                quality[entry.label] = measurer.measure(images, drawn_prompts)
    run_info = read_object(folder / RUN)
    table = report.rows(turns, run_info, quality)
    whole = {k: v for k, v in run_info.items() if k != "methods"} | {"folder": str(folder), "methods": table}
    checkpoints.write_text(folder / "bench.json", json.dumps(whole, indent=1) + "\n")
    checkpoints.write_text(folder / "table.md", report.markdown(table, run_info))
    if plots:
        from lanternpp.evaluation import plots as drawing

        drawing.draw(table, report.by_row(turns, race.pipe.target.width), folder)
    return whole


def show(whole: dict[str, Any]) -> None:
    """The figures as a table on stdout."""
    from lanternpp.evaluation import report

    shown = [column for column in report.columns(whole["methods"]) if column not in report.WIDE]
    rows = [[report.cell(row, c, brief=True).strip("`") for c in shown] for row in whole["methods"]]
    headings = [report.HEADINGS[column] for column in shown]
    show_table(headings, rows, caption="quartiles, and where the time goes: table.md")
