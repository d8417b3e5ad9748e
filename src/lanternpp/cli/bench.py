"""`lanternpp bench`: methods side by side over prompts and seeds, in seconds, codes per pass and quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import BASELINE, DrawOptions, MeasureDials, MethodDials, names
from lanternpp.cli import options as opt
from lanternpp.cli.plots import plots_enabled
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar, say
from lanternpp.errors import InputError
from lanternpp.util import files
from lanternpp.util.jsonfile import read_object
from lanternpp.util.options import Option

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.equal import StrengthSearch
    from lanternpp.evaluation.quality import Quality
    from lanternpp.evaluation.race import Entry, Race

OUTPUT = Path("out/bench")
DEFAULT_METHODS = ("ar", "eagle", "eagle2", "lantern", "lantern++", "jacobi-coupled", "lantern-jacobi")
MOST = 1024  # pictures at once


@dataclass(frozen=True)
class FieldOptions:
    """What races."""

    methods: Annotated[
        str | None,
        Option(
            'Methods separated by commas, each followed by its overrides: "eagle, lantern++ k=10 lambda=5". '
            "Plain AR is always among them. Default: those of "
            + ", ".join(DEFAULT_METHODS)
            + " that the model has a drafter for.",
            metavar="A,B,...",
        ),
    ] = None
    batch_sizes: Annotated[
        str | None,
        Option(
            "Race at each of these batch sizes, pictures per second: -n turns for each, of twice as many pictures.",
            metavar="A,B,...",
        ),
    ] = None
    measure_tv: Annotated[
        bool, Option("Measure tv_cost on one picture per prompt, drawn again and not timed.", negative=True)
    ] = True
    equal_tv: Annotated[
        str | None,
        Option(
            "Race relaxed rules at the strengths at which each code costs so much total variation, such as 0.02,0.05,0.1; "
            "the strengths are found first. --methods then names methods without their strength. Default: every relaxed rule, "
            "on chains of the parallel drafter, or else with eagle.",
            metavar="X,Y,...",
        ),
    ] = None
    equal_pictures: Annotated[
        int, Option("Pictures that a strength of --equal-tv is measured on.", ge=1, le=100_000)
    ] = 8
    profile: Annotated[
        bool,
        Option(
            "Afterwards run the first steps of each method under torch.profiler: a table of operations and a trace, and what "
            "the target's passes reach of the bandwidth and arithmetic measured here."
        ),
    ] = False


@dataclass(frozen=True)
class QualityOptions:
    """What is measured of pictures."""

    quality: Annotated[
        bool | None,
        Option(
            "Fréchet distance, precision, recall, prompt accuracy; default: where the model has a classifier and 4 pictures are drawn.",
            negative=True,
            group="Quality",
        ),
    ] = None
    pictures: Annotated[
        Path | None,
        Option("Measure the pictures of this folder, and draw none.", metavar="DIR", group="Quality"),
    ] = None
    reference: Annotated[
        Path | None,
        Option(
            "Pictures to compare with, an imagefolder's val/ where it has one; default: the model's own "
            "features of its validation photos.",
            metavar="DIR",
            group="Quality",
        ),
    ] = None
    features: Annotated[
        str | None,
        Option(
            "The network whose features are compared: classifier (the model's own, the default), inception, or module:Class.",
            metavar="NAME",
            group="Quality",
        ),
    ] = None
    clip: Annotated[
        str | None,
        Option("Also the CLIP score, by this CLIP model.", metavar="DIR|HUB_ID", group="Quality"),
    ] = None


@opt.verb
def bench(
    *,
    prompts: opt.Prompts = None,
    n: opt.Count = 4,
    field: FieldOptions = FieldOptions(),
    output: Annotated[Path, opt.folder("Where figures, plots and pictures go.")] = OUTPUT,
    resume: Annotated[bool, Option("Go on with the run in the folder.")] = False,
    plots: opt.Plots = None,
    as_json: opt.Json = False,
    options: Annotated[
        DrawOptions, opt.Without(("size", "method", *names(MethodDials, MeasureDials)))
    ] = DrawOptions(),
    seed: opt.Seed = 0,
    measured: QualityOptions = QualityOptions(),
) -> None:
    """Compare methods on one model: -n pictures per prompt and method, the methods taking turns.

    Writes table.md, bench.json, plots and every picture to the folder. Interrupt it when you like: --resume
    goes on. One picture at a time unless --batch-size says otherwise.
    """
    if measured.pictures is not None:
        if vars(field) != vars(FieldOptions()) or prompts or options.overrides:
            raise InputError("--pictures draws nothing: leave out the options of drawing")
        show_folder(measured.pictures, measured, options, as_json)
        return
    limits, sizes = read_limits(field.equal_tv), read_sizes(field.batch_sizes)
    if sizes and "batch_size" in options.overrides:
        raise InputError("--batch-size would change nothing beside --batch-sizes; leave one out")

    from lanternpp.api.model import model_folder
    from lanternpp.evaluation.prompts import read_prompts, spread
    from lanternpp.evaluation.race import Race, parse_methods

    named = None if field.methods is None else parse_methods(field.methods)
    with_plots = plots_enabled(plots)
    prompt_list = read_prompts(prompts, model_folder(options.model))
    pipe = opt.read(options)
    shared, found = dict(options.overrides), dict[str, dict[str, float]]()
    entries = named or parse_methods(", ".join(relaxed_methods(pipe) if limits else default_methods(pipe)))
    count = 2 * n * sizes[0] if sizes else n * len(prompt_list)
    measurer = None if measured.quality is False else make_measurer(pipe, count, measured)
    if limits:
        from lanternpp.evaluation.equal import StrengthSearch

        check_new(output, resume)
        search = StrengthSearch(pipe, prompt_list, field.equal_pictures, seed, shared, output / "strengths")
        entries, found = at_equal_tv(search, entries, limits)
    table: list[dict[str, Any]] = []
    profiles: list[list[str]] = []
    for size in sizes or (0,):
        drawn, turn = (spread(prompt_list, n), 2 * size) if size else (prompt_list, None)
        own = shared | ({"batch_size": size} if size else {})
        race = Race(pipe, entries, drawn, turn or n, seed, own, field.measure_tv, turn)
        where = output / f"batch-{size}" if size else output
        rows = run(race, measurer, where, resume, with_plots, found)
        table += rows
        if field.profile:
            with progress_bar("profiling") as progress:
                from lanternpp.evaluation.profile import profile_race

                profiles += profile_race(race, rows, where, progress)
    result = written(race, table, output, with_plots)
    if as_json:
        print(json.dumps(result))
        return
    show(table)
    if field.profile:
        from lanternpp.evaluation.profile import COLUMNS

        show_table(COLUMNS, profiles, prose=True, caption=f"operations and traces: {output}/profile-*")
    print(str(output / "table.md"))


def read_numbers(
    text: str | None, kind: type, option: str, wanted: str, low: float, high: float
) -> list[Any]:
    """Numbers separated by commas, ascending; InputError unless each is in the range [low, high]."""
    if text is None:
        return []
    try:
        found = sorted({kind(word) for word in text.split(",")})
    except ValueError:
        found = []
    if not found or not low <= found[0] <= found[-1] <= high:
        raise InputError(f"{option} {text!r} must be {wanted}, separated by commas")
    return found


def read_limits(text: str | None) -> list[float]:
    """Total variations per code."""
    return read_numbers(text, float, "--equal-tv", "numbers above 0 and below 1", 1e-12, 1 - 1e-12)


def read_sizes(text: str | None) -> list[int]:
    """Batch sizes."""
    return read_numbers(text, int, "--batch-sizes", f"whole numbers from 1 to {MOST}", 1, MOST)


def relaxed_methods(pipe: Pipeline) -> list[str]:
    """Every relaxed rule on one drafter, without a strength, as `--methods` takes them."""
    from lanternpp.api.settings import dials_read
    from lanternpp.evaluation.equal import STRENGTHS

    base = "parallel" if pipe.can_draft(pipe.settings("parallel")) else "eagle"
    near = f" k={pipe.settings('lantern++').neighbours}"
    by_neighbours = {name for name in STRENGTHS if "neighbours" in dials_read("none", name)}
    rules = [name for name in STRENGTHS if name not in by_neighbours or pipe.target.codebook is not None]
    return [f"{base} accept={name}{near if name in by_neighbours else ''}" for name in rules]


def at_equal_tv(
    search: StrengthSearch, field: Sequence[Entry], limits: Sequence[float]
) -> tuple[list[Entry], dict[str, dict[str, float]]]:
    """Entries at the strengths that cost each limit, plain decoding first, and figures of theirs by label.

    Says on stderr which cannot cost so little.
    """
    plain, relaxed = field[0], [entry for entry in field if entry.method != BASELINE]
    for entry in relaxed:
        search.dial(entry)
    entries, found = [plain], dict[str, dict[str, float]]()
    with progress_bar("finding strengths") as progress:
        for i, (limit, entry) in enumerate(product(limits, relaxed)):
            if progress:
                progress(i, len(limits) * len(relaxed))
            strength = search.find(entry, limit)
            if strength is None:
                say(
                    "bench",
                    f"{entry.label} costs more than {limit:g} a code at any strength: left out there",
                )
            elif strength.entry.label not in found:
                entries.append(strength.entry)
                found[strength.entry.label] = {"tv_per_code": strength.tv_per_code, "tv_budget": limit}
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


def make_measurer(pipe: Pipeline, count: int, measured: QualityOptions) -> Quality | None:
    """What measures `count` pictures of each method; made before any is drawn, so that mistakes are reported first.

    None where no option asks for it and the model has no classifier or the pictures are too few.
    """
    from lanternpp.evaluation.classifier import has_classifier
    from lanternpp.evaluation.quality import LEAST, Quality

    reference, features, clip = measured.reference, measured.features, measured.clip
    asked = measured.quality or reference or features or clip
    if not asked and (count < LEAST or not has_classifier(pipe.folder)):
        return None
    if count < LEAST:
        raise InputError(
            f"{count} pictures of each method are too few to measure; at least {LEAST} are needed: "
            "raise -n, or give more prompts"
        )
    return Quality.for_model(pipe.folder, reference, features, clip, pipe.device)


def check_new(folder: Path, resume: bool) -> None:
    """InputError where a folder holds a run that is not to go on; a race says so itself, but after strengths were found."""
    from lanternpp.evaluation.race import ELSEWHERE, RUN

    if (folder / RUN).exists() and not resume:
        raise InputError(f"{folder} holds a run already; go on with it by --resume, or {ELSEWHERE}")


def run(
    race: Race,
    measurer: Quality | None,
    folder: Path,
    resume: bool,
    plots: bool,
    known: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Race, and measure the pictures; the rows of the table. known: further figures by label."""
    from PIL import Image

    from lanternpp.evaluation import report

    with progress_bar("racing") as progress:
        turns = race.run(folder, resume, progress)
    quality = {label: dict(figures) for label, figures in known.items()}
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
    table = report.rows(turns, race.describe(), quality)
    if plots:
        from lanternpp.evaluation import plots as drawing

        drawing.draw(table, report.by_row(turns, race.pipe.target.width), folder)
    return table


def written(race: Race, table: Sequence[Mapping[str, Any]], folder: Path, plots: bool) -> dict[str, Any]:
    """Write table.md and bench.json, and throughput.png of several batch sizes; returns the content of bench.json."""
    from lanternpp.evaluation import report
    from lanternpp.evaluation.plots import save, throughput
    from lanternpp.evaluation.race import RUN

    info = read_object(folder / RUN) if (folder / RUN).exists() else race.describe()
    result = {k: v for k, v in info.items() if k != "methods"} | {"folder": str(folder), "methods": table}
    files.write_text(folder / "bench.json", json.dumps(result, indent=1) + "\n")
    files.write_text(folder / "table.md", report.markdown(table, info))
    if plots and len({row["batch_size"] for row in table}) > 1:
        save(throughput(table), folder / "throughput.png")
    return result


def show(table: Sequence[Mapping[str, Any]]) -> None:
    """The figures as a table on stdout."""
    from lanternpp.evaluation import report

    shown = [column for column in report.columns(table) if column not in report.WIDE]
    rows = [[report.cell(row, c, brief=True).strip("`") for c in shown] for row in table]
    headings = [report.HEADINGS[column] for column in shown]
    show_table(headings, rows, caption="quartiles, and where the time goes: table.md")


def show_folder(folder: Path, measured: QualityOptions, options: DrawOptions, as_json: bool) -> None:
    """The figures of a folder of pictures; their prompts are read from its metadata.jsonl, or from the files."""
    from lanternpp.api.model import model_folder
    from lanternpp.api.pipeline import versions
    from lanternpp.evaluation import report
    from lanternpp.evaluation.pictures import Gallery
    from lanternpp.evaluation.quality import LEAST, Quality

    images = Gallery.read(folder, LEAST, one_size=True)
    if measured.clip and not any(images.prompts):
        raise InputError(f"no picture in {folder} has a prompt; --clip compares pictures with their prompts")
    given = (measured.reference, measured.features, measured.clip, options.device)
    with progress_bar("reading the reference") as progress:
        quality = Quality.for_model(model_folder(options.model), *given, progress)
    with progress_bar("measuring") as progress:
        figures = quality.measure(images, images.prompts, progress)
    against = quality.against
    row = {"folder": str(folder), "images": len(images), "versions": versions(), **figures}
    row |= {"features": quality.features, "reference": against and against.name}
    row["reference_images"] = against and len(against.features)
    if as_json:
        print(json.dumps(row))
        return
    shown = [name for name in report.HEADINGS if name in figures]
    rows = [[report.HEADINGS[name], report.cell(row, name)] for name in shown]
    show_table(("figure", "value"), rows, f"{folder}: {len(images)} pictures beside {row['reference']}")
