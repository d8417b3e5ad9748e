"""`lanternpp bench`: methods side by side over prompts and seeds, in seconds, codes per pass and quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import BASELINE, DIALS, DrawOptions, MeasureDials, MethodDials, names
from lanternpp.cli import options as opt
from lanternpp.errors import InputError
from lanternpp.evaluation.papers import PAPERS, find_paper
from lanternpp.util.files import locked, write_text
from lanternpp.util.jsonfile import write_json
from lanternpp.util.options import Option
from lanternpp.util.terminal import progress_bar, say, show_table

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.equal import StrengthSearch
    from lanternpp.evaluation.quality import Quality
    from lanternpp.evaluation.race import Entry, Race

OUTPUT = Path("out/bench")
DEFAULT_METHODS = (
    "ar",
    "eagle",
    "eagle2",
    "parallel",
    "lantern",
    "lantern++",
    "jacobi-coupled",
    "lantern-jacobi",
)
DEFAULT = f"Default: those of {', '.join(DEFAULT_METHODS)} that the model has a drafter for."


@dataclass(frozen=True)
class FieldOptions:
    """The methods of a race.

    methods: Methods separated by commas, each followed by its overrides: "eagle, lantern++ neighbours=10 lambda=5". Plain decoding is always
        among them.
    paper: The published sampling and methods of a paper, not fitted to the machine, and its table's columns. Options of sampling
        and --methods go before it.
    batch_sizes: Race at each of these batch sizes, pictures per second: -n turns for each, of twice as many pictures.
    measure_tv: Measure tv_cost, the total variation summed over the codes of a picture, on the first picture of each prompt, or
        its first batch, drawn again and not timed.
    equal_tv: Race relaxed rules at the strengths at which each code costs so much total variation, such as 0.02,0.05,0.1; the
        strengths are found first. --methods then names methods without their strength. Default: every relaxed rule, on chains
        of the parallel drafter, or else with eagle.
    equal_pictures: Pictures that a strength of --equal-tv is measured on.
    profile: Afterwards run the first steps of each method under torch.profiler: a table of operations and a trace, and the
        share of the measured bandwidth and arithmetic that the target's passes reach.
    """

    methods: Annotated[str | None, Option(metavar="A,B,...", more=DEFAULT)] = None
    paper: Annotated[
        str | None, Option(metavar="NAME", validate=find_paper, more=f"One of: {', '.join(PAPERS)}.")
    ] = None
    batch_sizes: Annotated[str | None, Option(metavar="A,B,...")] = None
    measure_tv: Annotated[bool, Option(negative=True)] = True
    equal_tv: Annotated[str | None, Option(metavar="X,Y,...")] = None
    equal_pictures: Annotated[int, Option(ge=1, le=100_000)] = 8
    profile: bool = False

    def checked(self, overrides: Mapping[str, Any]) -> tuple[list[float], list[int]]:
        """The limits of --equal-tv, and the batch sizes. InputError where options contradict each other."""
        tiny, allowed = 1e-12, "numbers above 0 and below 1"
        limits = opt.read_numbers(self.equal_tv, float, "--equal-tv", allowed, tiny, 1 - tiny)
        if limits and self.paper:
            raise InputError("--paper gives the strengths that --equal-tv searches; leave one out")
        if limits and overrides.get("fit"):
            raise InputError("--equal-tv compares rules on the methods' own drafts; leave out --fit")
        sizes = opt.read_sizes(self.batch_sizes)
        if sizes and "batch_size" in overrides:
            raise InputError("--batch-size would change nothing beside --batch-sizes; leave one out")
        return limits, sizes


@dataclass(frozen=True)
class QualityOptions:
    """The measurements of pictures.

    quality: Fréchet distance, precision, recall, prompt accuracy; default: where the model has a classifier and 4 pictures are
        drawn.
    pictures: Measure the pictures of this folder, and draw none.
    reference: Pictures to compare with, an imagefolder's val/ where it has one; default: the model's own features of its
        validation photos.
    features: The network whose features are compared: classifier (the model's own, the default), inception, or module:Class.
    clip: Also the CLIP score, by this CLIP model.
    """

    heading = "Quality"
    quality: Annotated[bool | None, Option(negative=True)] = None
    pictures: Annotated[Path | None, Option(metavar="DIR")] = None
    reference: Annotated[Path | None, Option(metavar="DIR")] = None
    features: Annotated[str | None, Option(metavar="NAME")] = None
    clip: Annotated[str | None, Option(metavar="DIR|HUB_ID")] = None


@opt.verb
def bench(
    *,
    prompts: opt.Prompts = None,
    n: opt.Count = 4,
    field: FieldOptions = FieldOptions(),
    output: Annotated[Path, opt.Folder] = OUTPUT,
    resume: bool = False,
    plots: opt.Plots = None,
    as_json: opt.Json = False,
    options: Annotated[
        DrawOptions, opt.without("size", "method", *names(MethodDials, MeasureDials))
    ] = DrawOptions(),
    seed: opt.Seed = 0,
    measured: QualityOptions = QualityOptions(),
) -> None:
    """Compare methods on one model: -n pictures per prompt and method, the methods taking turns.

    Writes table.md, paper.md and .csv, bench.json, plots and every picture with its prompt to the folder. Interrupt it when you like: --resume
    goes on. One picture at a time unless --batch-size says otherwise.

    output: Where figures, plots and pictures go.
    resume: Go on with the run in the folder.
    """
    if measured.pictures is not None:
        usual = {name: each.default for name, each in signature(bench).parameters.items()}
        usual |= vars(FieldOptions()) | vars(DrawOptions())
        asked = {"prompts": prompts, "n": n, "output": output, "resume": resume, "plots": plots, "seed": seed}
        asked |= vars(field) | {"drafter": options.drafter, "dtype": options.dtype} | options.overrides
        asked["no_quality"] = measured.quality is False or None
        leave_out("--pictures draws nothing", asked, usual)
        show_folder(measured.pictures, measured, options, as_json)
        return
    if measured.quality is False:
        given = {name: getattr(measured, name) for name in ("reference", "features", "clip")}
        leave_out("--no-quality measures no pictures", given, {})
    limits, sizes = field.checked(options.overrides)

    from lanternpp.api.model import model_folder
    from lanternpp.evaluation.equal import StrengthSearch
    from lanternpp.evaluation.profile import COLUMNS, profile_race
    from lanternpp.evaluation.prompts import GENEVAL, fetch, read_prompts, read_rows, spread
    from lanternpp.evaluation.race import Race, parse_methods

    with locked(output):
        check_folder(output, bool(sizes), resume)
        paper = find_paper(field.paper) if field.paper else None
        methods = paper.methods if paper and field.methods is None else field.methods
        named = None if methods is None else parse_methods(methods)
        prompts = prompts and fetch(prompts)
        with_plots = opt.plots_enabled(plots)
        prompt_list = read_prompts(prompts, model_folder(options.model))
        pipe = opt.read(options)
        if limits and pipe.target.channels:
            raise InputError(
                f"--equal-tv is for models of codes, and {pipe.name} draws latents; leave it out"
            )
        shared = dict(options.overrides)
        if paper and named:
            named = [paper.entry(entry) for entry in named]
            shared = {"fit": False, **paper.sampling, **shared}
        usual_methods = relaxed_methods if limits else default_methods
        entries = named or parse_methods(", ".join(usual_methods(pipe)))
        measurer = make_measurer(pipe, 2 * n * sizes[0] if sizes else n * len(prompt_list), measured)
        if limits:
            shared["fit"] = False
            chosen = (prompt_list, field.equal_pictures, seed, shared)
            search = StrengthSearch(pipe, entries, *chosen, output / "strengths")
            entries = at_equal_tv(search, entries, limits)
        rows_of = read_rows(prompts) if prompts and prompts.suffix.lower() == ".jsonl" and not sizes else []
        geneval = rows_of if all(row.keys() >= GENEVAL for row in rows_of) else []
        table: list[dict[str, Any]] = []
        profiles: list[list[str]] = []
        for size in sizes or (0,):
            drawn, turn = (spread(prompt_list, n), 2 * size) if size else (prompt_list, None)
            own = shared | ({"batch_size": size} if size else {})
            race = Race(pipe, entries, drawn, turn or n, seed, own, field.measure_tv, turn)
            where = output / f"batch-{size}" if size else output
            rows = run(race, measurer, where, with_plots, geneval)
            table += rows
            if field.profile:
                with progress_bar("profiling") as progress:
                    profiles += profile_race(race, rows, where, progress)
        result = written(race, table, n, output, with_plots, paper.source if paper else None)
    if as_json:
        print(json.dumps(result))
        return
    show(table, paper is not None)
    if field.profile:
        traces = output / "batch-*" if sizes else output
        show_table(COLUMNS, profiles, prose=True, caption=f"operations and traces: {traces}/profile-*")
    print(str(output / "table.md"))


def leave_out(why: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """InputError names the options that have no effect, and are not as usual."""
    idle = {name: value for name, value in given.items() if value != usual.get(name)}
    named = [f"no_{name}" if value is False else name for name, value in idle.items()]
    if spelled := [DIALS[x].option if x in DIALS else "--" + x.replace("_", "-") for x in named]:
        raise InputError(f"{why}: leave out {', '.join(spelled)}")


def check_folder(folder: Path, by_size: bool, resume: bool) -> None:
    """InputError where a folder holds a run that is not to go on, or tables that are not by batch size, or are, as `by_size` says."""
    from lanternpp.evaluation.race import FOLDER_REMEDY, RUN

    sizes = [path.parent for path in sorted(folder.glob(f"batch-*/{RUN}"))]
    if (folder / RUN).exists() if by_size else sizes:
        raise InputError(
            f"{folder} holds a run {'without' if by_size else 'with'} --batch-sizes; {FOLDER_REMEDY}"
        )
    for each in (folder, *sizes):
        if (each / RUN).exists() and not resume:
            raise InputError(f"{each} holds a run already; go on with it by --resume, or {FOLDER_REMEDY}")


def relaxed_methods(pipe: Pipeline) -> list[str]:
    """Every relaxed rule on one drafter, without a strength, as `--methods` takes them."""
    from lanternpp.api.settings import dials_read
    from lanternpp.evaluation.equal import STRENGTHS

    base = "parallel" if pipe.can_draft(pipe.settings("parallel")) else "eagle"
    near = f" k={pipe.settings('lantern++').neighbours}"
    rules = {name: near if "neighbours" in dials_read("none", name) else "" for name in STRENGTHS}
    return [f"{base} accept={n}{k}" for n, k in rules.items() if not k or pipe.target.codebook is not None]


def at_equal_tv(search: StrengthSearch, field: Sequence[Entry], limits: Sequence[float]) -> list[Entry]:
    """Entries at the strengths that cost each limit, plain decoding first; says on stderr which cannot cost so little."""
    relaxed = [entry for entry in field if entry.method != BASELINE]
    entries = {BASELINE: field[0]}
    with progress_bar("finding strengths") as progress:
        for i, (limit, entry) in enumerate(product(limits, relaxed)):
            if progress:
                progress(i, len(limits) * len(relaxed))
            if (found := search.find(entry, limit)) is None:
                costs = f"{entry.label} costs more than {limit:g} a code at any strength"
                say("bench", f"{costs}: left out there")
            else:
                entries.setdefault(found.label, found)
    return list(entries.values())


def default_methods(pipe: Pipeline) -> list[str]:
    """The methods that are compared by default; says on stderr which do not suit the model."""
    ready = [name for name in DEFAULT_METHODS if pipe.can_draft(pipe.settings(name))]
    if lacking := ", ".join(name for name in DEFAULT_METHODS if name not in ready):
        draws = "draws latents, or " if pipe.target.channels else ""
        say("bench", f"left out, since {pipe.name} {draws}lacks a network or codebook for them: {lacking}")
    return ready


def make_measurer(pipe: Pipeline, count: int, measured: QualityOptions) -> Quality | None:
    """The measurer of `count` pictures of each method; made before any is drawn, so that mistakes are reported first.

    None by --no-quality, and where no option asks for it and the model has no classifier or the pictures are too few.
    """
    from lanternpp.evaluation.classifier import has_classifier
    from lanternpp.evaluation.quality import MIN_PICTURES, Quality

    given = (measured.reference, measured.features, measured.clip)
    possible = count >= MIN_PICTURES and has_classifier(pipe.folder)
    if measured.quality is False or not (measured.quality or any(given) or possible):
        return None
    if count < MIN_PICTURES:
        raise InputError(
            f"{count} pictures of each method are too few to measure; at least {MIN_PICTURES} are needed: "
            "raise -n, or give more prompts"
        )
    return Quality.for_model(pipe.folder, *given, pipe.device)


def run(
    race: Race,
    measurer: Quality | None,
    folder: Path,
    plots: bool,
    geneval: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Race, and measure the pictures; the rows of the table.

    geneval: rows of GenEval's prompts; each method's pictures are also written in the folders that its scorer reads.
    """
    from lanternpp.evaluation import report
    from lanternpp.evaluation.pictures import Gallery, write_captions
    from lanternpp.evaluation.prompts import write_geneval
    from lanternpp.evaluation.race import PICTURES

    with progress_bar("racing") as progress:
        turns = race.run(folder, progress)
    quality = {entry.label: dict(entry.figures or {}) for entry in race.entries}
    for entry in race.entries:
        mine = [turn for turn in turns if turn.label == entry.label]
        drawn = [(turn.prompt, folder / name) for turn in mine for name in turn.files]
        pictures = folder / PICTURES / entry.slug
        write_captions(pictures, {path.name: race.prompts[prompt] for prompt, path in sorted(drawn)})
        if geneval:
            write_geneval(geneval, drawn, folder / "geneval" / entry.slug)
        if measurer:
            gallery = Gallery.read(pictures)
            with progress_bar(f"measuring {entry.label}") as progress:
                quality[entry.label] |= measurer.measure(gallery, gallery.prompts, progress)
    table = report.rows(turns, race.describe(), quality)
    if plots:
        report.plot(table, report.by_row(turns, race.pipe.target.width), folder)
    return table


def written(
    race: Race, table: Sequence[Mapping[str, Any]], n: int, folder: Path, plots: bool, source: str | None
) -> dict[str, Any]:
    """Write the tables and bench.json, and throughput.png of several batch sizes; returns the content of bench.json.

    n: as asked, while that of a race depends on its batch size. source: where the settings were published.
    """
    from lanternpp.evaluation import report

    info = race.describe() | {"n": n}
    result = {k: v for k, v in info.items() if k != "methods"} | {"folder": str(folder), "methods": table}
    result |= {"paper": source} if source else {}
    settings = f"\nSettings of {source}.\n" if source else ""
    write_json(folder / "bench.json", result)
    write_text(folder / "table.md", report.markdown(table, info) + settings)
    write_text(folder / "paper.md", report.markdown(table, info, report.PAPER) + settings)
    write_text(folder / "paper.csv", report.comma_separated(table, report.PAPER))
    if plots and len({row["batch_size"] for row in table}) > 1:
        report.save_figure(report.throughput(table), folder / "throughput.png")
    return result


def show(table: Sequence[Mapping[str, Any]], paper: bool) -> None:
    """The figures as a table on stdout, in a paper's columns or in our own."""
    from lanternpp.evaluation import report

    headings = report.PAPER if paper else report.HEADINGS
    shown = [c for c in report.columns(table, headings) if paper or c not in report.WIDE]
    rows = [[report.cell(row, c, brief=True).strip("`") for c in shown] for row in table]
    show_table([headings[c] for c in shown], rows, caption="quartiles, and where the time goes: table.md")


def show_folder(folder: Path, measured: QualityOptions, options: DrawOptions, as_json: bool) -> None:
    """The figures of a folder of pictures; their prompts are read from its metadata.jsonl, or from the files."""
    from lanternpp.api.model import model_folder
    from lanternpp.api.pipeline import versions
    from lanternpp.evaluation import report
    from lanternpp.evaluation.pictures import Gallery
    from lanternpp.evaluation.quality import MIN_PICTURES, Quality

    images = Gallery.read(folder, MIN_PICTURES, one_size=True)
    if measured.clip and not any(images.prompts):
        raise InputError(f"no picture in {folder} has a prompt; --clip compares pictures with their prompts")
    given = (measured.reference, measured.features, measured.clip, options.device)
    with progress_bar("reading the reference") as progress:
        quality = Quality.for_model(model_folder(options.model), *given, progress)
    with progress_bar("measuring") as progress:
        figures = quality.measure(images, images.prompts, progress)
    row = {"folder": str(folder), "images": len(images), "versions": versions(), **figures}
    row |= {"features": quality.features, "reference": quality.reference_name}
    row["reference_images"] = None if quality.reference is None else len(quality.reference)
    if as_json:
        print(json.dumps(row))
        return
    rows = [(heading, report.cell(row, name)) for name, heading in report.HEADINGS.items() if name in figures]
    show_table(("figure", "value"), rows, f"{folder}: {len(images)} pictures beside {row['reference']}")
