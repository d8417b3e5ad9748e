"""`lanternpp bench`: methods side by side over prompts and seeds, in seconds, codes per pass and quality."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lanternpp.api.options import DIALS, DrawOptions, MeasureDials, MethodDials, names
from lanternpp.cli import options as opt
from lanternpp.errors import InputError, counted
from lanternpp.evaluation.papers import PAPERS, find_paper
from lanternpp.util.files import locked
from lanternpp.util.options import Option
from lanternpp.util.terminal import say, show_table

if TYPE_CHECKING:
    from lanternpp import Pipeline
    from lanternpp.evaluation.quality import Quality
    from lanternpp.evaluation.race import Race

OUTPUT = Path("out/bench")
DEFAULT_METHODS = "ar, eagle, eagle2, parallel, lantern, lantern++, jacobi-coupled, lantern-jacobi"
DEFAULT = f"Default: those of {DEFAULT_METHODS} that the model has a drafter for."


@dataclass(frozen=True)
class RaceOptions:
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
        """Return the limits of --equal-tv and the batch sizes; raise InputError if options contradict each other."""
        epsilon, allowed = 1e-12, "numbers above 0 and below 1"
        limits = opt.read_numbers(self.equal_tv, float, "--equal-tv", allowed, epsilon, 1 - epsilon)
        if limits and self.paper:
            raise InputError("--paper gives the strengths that --equal-tv searches; leave one out")
        if self.equal_pictures != RaceOptions.equal_pictures and not limits:
            raise InputError("--equal-pictures would change nothing without --equal-tv; leave it out")
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
    race_options: RaceOptions = RaceOptions(),
    output: Annotated[Path, opt.Folder] = OUTPUT,
    resume: bool = False,
    plots: opt.Plots = None,
    as_json: opt.Json = False,
    options: Annotated[
        DrawOptions, opt.without("size", "method", *names(MethodDials, MeasureDials))
    ] = DrawOptions(),
    seed: opt.Seed = 0,
    quality_options: QualityOptions = QualityOptions(),
) -> None:
    """Compare methods on one model: -n pictures per prompt and method, the methods taking turns.

    Writes table.md, paper.md and .csv, bench.json, plots and every picture with its prompt to the folder. Interrupt it when you like: --resume
    goes on. One picture at a time unless --batch-size says otherwise.

    output: Where figures, plots and pictures go.
    resume: Go on with the run in the folder.
    """
    if quality_options.pictures is not None:
        defaults = {name: parameter.default for name, parameter in signature(bench).parameters.items()}
        defaults |= vars(RaceOptions()) | vars(DrawOptions())
        values: dict[str, Any] = {"prompts": prompts, "n": n, "output": output, "resume": resume}
        values |= {"plots": plots, "seed": seed, **vars(race_options), "drafter": options.drafter}
        values |= {"dtype": options.dtype, **options.overrides}
        values["no_quality"] = quality_options.quality is False or None
        reject_options("--pictures draws nothing", values, defaults)
        show_folder(quality_options.pictures, quality_options, options, as_json)
        return
    if quality_options.quality is False:
        values = {name: getattr(quality_options, name) for name in ("reference", "features", "clip")}
        reject_options("--no-quality measures no pictures", values, {})
    limits, sizes = race_options.checked(options.overrides)

    from lanternpp.api.model import model_folder
    from lanternpp.evaluation import report
    from lanternpp.evaluation.equal import StrengthSearch, relaxed_methods
    from lanternpp.evaluation.profile import COLUMNS, profile_race
    from lanternpp.evaluation.prompts import GENEVAL, fetch, read_prompts, read_rows, spread
    from lanternpp.evaluation.race import Race, check_folder, parse_methods

    with locked(output):
        check_folder(output, bool(sizes), resume)
        paper = find_paper(race_options.paper) if race_options.paper else None
        methods = paper.methods if paper and race_options.methods is None else race_options.methods
        entries = [] if methods is None else parse_methods(methods)
        prompts = prompts and fetch(prompts)
        with_plots = opt.plots_enabled(plots)
        prompt_list = read_prompts(prompts, model_folder(options.model))
        pipe = opt.read(options)
        if limits and pipe.target.channels:
            raise InputError(f"--equal-tv is for models of codes: {pipe.name} draws latents; leave it out")
        shared = dict(options.overrides)
        if paper:
            entries = [paper.entry(entry) for entry in entries]
            shared = {"fit": False, **paper.sampling, **shared}
        if not entries:
            entries = parse_methods(", ".join(relaxed_methods(pipe) if limits else default_methods(pipe)))
        quality = open_quality(pipe, 2 * n * sizes[0] if sizes else n * len(prompt_list), quality_options)
        if limits:
            shared["fit"] = False
            # The race checks -n, --drafter and the prompts now, before strengths are searched.
            race = Race(pipe, entries, prompt_list, n, seed, shared, measure_tv=False)
            num_pictures, folder = race_options.equal_pictures, output / "strengths"
            entries = StrengthSearch(race, num_pictures, folder).entries_at(limits)
        lines = read_rows(prompts) if prompts and prompts.suffix.lower() == ".jsonl" and not sizes else []
        geneval = lines if all(line.keys() >= GENEVAL for line in lines) else []
        table: list[dict[str, Any]] = []
        profiles: list[list[str]] = []
        new_race = partial(Race, pipe, entries, seed=seed, measure_tv=race_options.measure_tv)
        for size in sizes or (None,):
            if size is None:
                race, folder = new_race(prompt_list, n, shared=shared), output
            else:
                dials, folder = shared | {"batch_size": size}, output / f"batch-{size}"
                race = new_race(spread(prompt_list, n), 2 * size, shared=dials, turn_size=2 * size)
            rows = run(race, quality, folder, with_plots, geneval)
            table += rows
            if race_options.profile:
                profiles += profile_race(race, rows, folder)
        # The n of a race depends on its batch size.
        facts = race.describe() | {"n": n}
        result = report.write(table, facts, output, with_plots, paper.source if paper else None)
    if as_json:
        print(json.dumps(result))
        return
    report.show(table, report.PAPER if paper else report.OURS)
    if race_options.profile:
        traces = output / "batch-*" if sizes else output
        show_table(COLUMNS, profiles, prose=True, caption=f"operations and traces: {traces}/profile-*")
    print(str(output / "table.md"))


def reject_options(reason: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InputError, which names the options with another value than their default, as none of them has an effect."""
    changed = {name: value for name, value in values.items() if value != defaults.get(name)}
    keys = [f"no_{name}" if value is False else name for name, value in changed.items()]
    if options := [DIALS[key].option if key in DIALS else "--" + key.replace("_", "-") for key in keys]:
        raise InputError(f"{reason}: leave out {', '.join(options)}")


def default_methods(pipe: Pipeline) -> list[str]:
    """Return the methods that are compared by default; say on stderr which methods do not suit the model."""
    candidates = DEFAULT_METHODS.split(", ")
    methods = [name for name in candidates if pipe.can_draft(pipe.settings(name))]
    if missing := ", ".join(name for name in candidates if name not in methods):
        latents = "draws latents, or " if pipe.target.channels else ""
        say("bench", f"left out, since {pipe.name} {latents}lacks a network or codebook for them: {missing}")
    return methods


def open_quality(pipe: Pipeline, num_pictures: int, options: QualityOptions) -> Quality | None:
    """Open the measurements of `num_pictures` pictures of each method; raise InputError before any picture is drawn.

    Return None with --no-quality, and without options if the model has no classifier or the pictures are too few.
    """
    from lanternpp.evaluation.classifier import has_classifier
    from lanternpp.evaluation.quality import MIN_PICTURES, Quality

    values = (options.reference, options.features, options.clip)
    possible = num_pictures >= MIN_PICTURES and has_classifier(pipe.folder)
    if options.quality is False or not (options.quality or any(values) or possible):
        return None
    if num_pictures < MIN_PICTURES:
        raise InputError(
            f"{counted(num_pictures, 'picture')} of each method cannot be measured; at least {MIN_PICTURES} are needed: "
            "raise -n, or give more prompts"
        )
    return Quality.for_model(pipe.folder, *values, pipe.device)


def run(
    race: Race, quality: Quality | None, folder: Path, plots: bool, geneval: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Run a race, measure its pictures, and return the rows of the table.

    geneval: rows of GenEval's prompts; each method's pictures are also written to the folders that GenEval's scorer reads.
    """
    from lanternpp.evaluation import report
    from lanternpp.evaluation.pictures import Gallery, write_captions
    from lanternpp.evaluation.prompts import write_geneval
    from lanternpp.evaluation.race import PICTURES, RUN

    is_resumed = (folder / RUN).exists()
    turns = race.run(folder)
    for name in report.PLOTS if is_resumed else ():  # they are drawn again, or no longer wanted
        (folder / f"{name}.png").unlink(missing_ok=True)
    figures = {entry.label: dict(entry.figures or {}) for entry in race.entries}
    for entry in race.entries:
        pictures = [(t.prompt, folder / name) for t in turns if t.label == entry.label for name in t.files]
        picture_folder = folder / PICTURES / entry.slug
        captions = {path.name: race.prompts[prompt] for prompt, path in sorted(pictures)}
        write_captions(picture_folder, captions)
        if geneval:
            write_geneval(geneval, pictures, folder / "geneval" / entry.slug)
        if quality:
            gallery = Gallery.read(picture_folder)
            figures[entry.label] |= quality.measure(gallery, gallery.prompts, f"measuring {entry.label}")
    table = report.rows(turns, race.describe(), figures)
    if plots:
        report.plot(table, report.by_row(turns, race.pipe.target.width), folder)
    return table


def show_folder(folder: Path, quality_options: QualityOptions, options: DrawOptions, as_json: bool) -> None:
    """Print the figures of a folder of pictures, whose prompts are read from its metadata.jsonl, or from the files."""
    from lanternpp.api.model import model_folder
    from lanternpp.api.results import versions
    from lanternpp.evaluation import report
    from lanternpp.evaluation.pictures import Gallery
    from lanternpp.evaluation.quality import MIN_PICTURES, Quality

    images = Gallery.read(folder, MIN_PICTURES, one_size=True)
    if quality_options.clip and not any(images.prompts):
        raise InputError(f"no picture in {folder} has a prompt; --clip compares pictures with their prompts")
    values = (quality_options.reference, quality_options.features, quality_options.clip)
    quality = Quality.for_model(model_folder(options.model), *values, options.device)
    figures = quality.measure(images, images.prompts)
    row = {"folder": str(folder), "images": len(images), "versions": versions(), **figures}
    row |= {"features": quality.features, "reference": quality.reference_name}
    row["reference_images"] = None if quality.reference is None else len(quality.reference)
    if as_json:
        print(json.dumps(row))
        return
    rows = [(report.COLUMNS[name][0], report.cell(row, name)) for name in report.QUALITY if name in figures]
    show_table(("figure", "value"), rows, f"{folder}: {len(images)} pictures beside {row['reference']}")
