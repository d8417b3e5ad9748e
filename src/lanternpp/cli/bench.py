"""`lanternpp bench`: methods side by side over prompts and seeds, in seconds, codes per pass and quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanternpp.api.options import DrawOptions, EngineDials, SamplingDials
from lanternpp.cli import old_options as opt
from lanternpp.cli.overrides import draws, read
from lanternpp.cli.plots import Plots, plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.errors import InputError
from lanternpp.util import files
from lanternpp.util.jsonfile import read_object

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.quality import Quality
    from lanternpp.evaluation.speed import Entry, Race
    from lanternpp.tuning.strengths import StrengthSearch

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
        "--measure-tv/--no-measure-tv",
        help="Measure tv_cost on one picture per prompt, drawn again and not timed.",
    ),
]
EqualTv = Annotated[
    str | None,
    typer.Option(
        "--equal-tv",
        metavar="X,Y,...",
        help="Race relaxed rules at the strengths at which each code spends so much total variation, such as 0.02,0.05,0.1; "
        "the strengths are found first. --methods then names methods without their strength. Default: every relaxed rule, "
        "on chains of the parallel drafter, or else with eagle.",
    ),
]
EqualPictures = Annotated[
    int,
    typer.Option(
        help="Pictures that a strength of --equal-tv is measured on.", callback=opt.within(1, 100_000)
    ),
]
Profiled = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Afterwards run the first steps of each method under torch.profiler, and write a table of operations and a trace.",
    ),
]
JudgeIt = Annotated[
    bool, typer.Option("--quality/--no-quality", help="Quality figures.", rich_help_panel=opt.PANEL_QUALITY)
]


@draws("size", "method", groups=(EngineDials, SamplingDials))
def bench(
    prompts: opt.Prompts = None,
    methods: Methods = None,
    n: opt.Count = 4,
    output: Folder = OUTPUT,
    resume: Resume = False,
    as_json: opt.Json = False,
    measure: Measure = True,
    equal_tv: EqualTv = None,
    equal_pictures: EqualPictures = 8,
    plots: Plots = None,
    profile: Profiled = False,
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
    budgets = parse_budgets(equal_tv)
    with_plots = plots_enabled(plots)

    from lanternpp.api.model import model_folder
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.evaluation.speed import Race

    prompt_list = read_prompts(prompts, model_folder(options.model))
    pipe = read(options)
    shared, found = dict(options.overrides), dict[str, dict[str, float]]()
    field = named or parse_methods(", ".join(relaxed_methods(pipe) if budgets else default_methods(pipe)))
    measurer = make_measurer(pipe, n * len(prompt_list), reference, features, clip) if quality else None
    if budgets:
        from lanternpp.tuning.strengths import StrengthSearch

        check_new(output, resume)
        search = StrengthSearch(pipe, prompt_list, equal_pictures, seed, shared, output / "strengths")
        field, found = at_equal_tv(search, field, budgets)
    race = Race(pipe, field, prompt_list, n, seed, shared, measure)
    table = run(race, measurer, output, resume, with_plots, found)
    profiles = profiled(race, table["methods"], output) if profile else []
    if as_json:
        typer.echo(json.dumps(table))
        return
    show(table)
    if profile:
        from lanternpp.evaluation.profile import COLUMNS

        show_table(COLUMNS, profiles, prose=True, caption=f"operations and traces: {output}/profile-*")
    typer.echo(str(output / "table.md"))


def parse_budgets(text: str | None) -> list[float]:
    """Total variations per code, ascending; InputError unless they are numbers between 0 and 1."""
    if text is None:
        return []
    try:
        budgets = sorted({float(word) for word in text.split(",")})
    except ValueError:
        budgets = []
    if not budgets or not all(0 < budget < 1 for budget in budgets):
        raise InputError(
            f"--equal-tv {text!r} must be numbers above 0 and below 1, parted by commas, as 0.02,0.05"
        )
    return budgets


def relaxed_methods(pipe: Pipeline) -> list[str]:
    """Every relaxed rule on one drafter, without a strength, as `--methods` takes them."""
    from lanternpp.api.settings import dials_read
    from lanternpp.tuning.strengths import STRENGTHS

    base = "parallel" if pipe.can_draft(pipe.settings("parallel")) else "eagle"
    near = f" k={pipe.settings('lantern++').neighbours}"
    lends = {name for name in STRENGTHS if "neighbours" in dials_read("none", name)}
    names = [name for name in STRENGTHS if name not in lends or pipe.target.codebook is not None]
    return [f"{base} accept={name}{near if name in lends else ''}" for name in names]


def at_equal_tv(
    search: StrengthSearch, field: Sequence[Entry], budgets: Sequence[float]
) -> tuple[list[Entry], dict[str, dict[str, float]]]:
    """Entries at the strengths that spend each budget, plain decoding first, and figures of theirs by label.

    Says on stderr which cannot spend so little.
    """
    from lanternpp.api.options import BASELINE

    plain, relaxed = field[0], [entry for entry in field if entry.method != BASELINE]
    for entry in relaxed:
        search.dial(entry)
    entries, found = [plain], dict[str, dict[str, float]]()
    with progress_bar("finding strengths") as progress:
        for i, (budget, entry) in enumerate(product(budgets, relaxed)):
            if progress:
                progress(i, len(budgets) * len(relaxed))
            strength = search.find(entry, budget)
            if strength is None:
                say(
                    "bench",
                    f"{entry.label} spends more than {budget:g} a code at any strength: left out there",
                )
            elif strength.entry.label not in found:
                entries.append(strength.entry)
                found[strength.entry.label] = {"tv_per_code": strength.spent, "tv_budget": budget}
    return entries, found


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
        if count < LEAST or not (pipe.folder / "classifier").is_dir():
            return None
    elif count < LEAST:
        raise InputError(
            f"{count} pictures of each method are too few to measure; at least {LEAST} are needed: "
            "raise -n, or give more prompts"
        )
    device = pipe.device
    return Quality.for_model(pipe.folder, reference, features, clip, device)


def check_new(folder: Path, resume: bool) -> None:
    """InputError where a folder holds a run that is not to go on; a race says so itself, but after strengths were found."""
    from lanternpp.evaluation.speed import RUN

    if (folder / RUN).exists() and not resume:
        raise InputError(
            f"{folder} holds a run already; go on with it by --resume, or choose another folder with -o"
        )


def run(
    race: Race,
    measurer: Quality | None,
    folder: Path,
    resume: bool,
    plots: bool,
    known: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Race, measure the pictures, and write all files; returns the content of bench.json. known: further figures by label."""
    from PIL import Image

    from lanternpp.evaluation import report
    from lanternpp.evaluation.speed import RUN

    with progress_bar("racing") as progress:
        turns = race.run(folder, resume, progress)
    quality = {label: dict(figures) for label, figures in (known or {}).items()}
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
                quality.setdefault(entry.label, {}).update(measurer.measure(images, drawn_prompts))
    run_info = read_object(folder / RUN)
    table = report.rows(turns, run_info, quality)
    whole = {k: v for k, v in run_info.items() if k != "methods"} | {"folder": str(folder), "methods": table}
    files.write_text(folder / "bench.json", json.dumps(whole, indent=1) + "\n")
    files.write_text(folder / "table.md", report.markdown(table, run_info))
    if plots:
        from lanternpp.evaluation import plots as drawing

        drawing.draw(table, report.by_row(turns, race.pipe.target.width), folder)
    return whole


def profiled(race: Race, table: Sequence[Mapping[str, Any]], folder: Path) -> list[list[str]]:
    """Profile every method of a race, and write the files; returns rows of `profile.COLUMNS`."""
    from lanternpp.evaluation.profile import profile_race

    with progress_bar("profiling") as progress:
        return profile_race(race, table, folder, progress)


def show(whole: dict[str, Any]) -> None:
    """The figures as a table on stdout."""
    from lanternpp.evaluation import report

    shown = [column for column in report.columns(whole["methods"]) if column not in report.WIDE]
    rows = [[report.cell(row, c, brief=True).strip("`") for c in shown] for row in whole["methods"]]
    headings = [report.HEADINGS[column] for column in shown]
    show_table(headings, rows, caption="quartiles, and where the time goes: table.md")
