"""`lanternpp eval`: quality figures of pictures, those of a folder or those that a method draws."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lanternpp.api.options import AUTO, DIALS, METHODS, DrawOptions
from lanternpp.cli import old_options as opt
from lanternpp.cli.output import png_path
from lanternpp.cli.overrides import check, draws, read
from lanternpp.cli.tables import show_table
from lanternpp.cli.terminal import progress_bar
from lanternpp.errors import InputError
from lanternpp.util.registry import unknown

if TYPE_CHECKING:
    from lanternpp.api.pipeline import Pipeline, Stats
    from lanternpp.evaluation.draw import EvaluationRequest
    from lanternpp.evaluation.pictures import Gallery
    from lanternpp.evaluation.quality import Quality

DRAWN = 100  # pictures, unless -n says otherwise
_drawing = partial(typer.Option, rich_help_panel="Drawing (METHOD only)")

Source = Annotated[
    str,
    typer.Argument(
        metavar="IMAGES|METHOD",
        help="A folder of pictures, or a method whose pictures are drawn first; ./NAME is always a folder.",
    ),
]
Count = Annotated[
    int | None,
    _drawing(
        "-n",
        "--n",
        help=f"Pictures in all; default: {DRAWN}.",
        callback=opt.within(4, 1_000_000, "4 or more"),
    ),
]
Prompts = Annotated[
    Path | None,
    _drawing(
        metavar="FILE", help="One prompt per line, taken in turn; default: the captions of the reference."
    ),
]
Keep = Annotated[Path | None, _drawing("-o", "--output", metavar="DIR", help="Keep the pictures there.")]


@draws("size", "method")
def evaluate(
    source: Source,
    reference: opt.Reference = None,
    features: opt.Features = None,
    clip: opt.Clip = None,
    as_json: opt.Json = False,
    *,
    options: DrawOptions,
    n: Count = None,
    prompts: Prompts = None,
    output: Keep = None,
    seed: opt.Seed = 0,
) -> None:
    """Measure pictures against a reference: Fréchet distance, precision, recall, prompt accuracy, CLIP score.

    Prompts of pictures in a folder are read from its metadata.jsonl, or from the files that generate wrote.
    """
    draws = source in (*METHODS, AUTO)
    if draws:
        options = replace(options, method=source)
        check(options)
        empty(output)
    else:
        drawing = {
            "drafter": options.drafter,
            "n": n,
            "prompts": prompts,
            "output": output,
            **options.overrides,
        }
        images_folder(source, drawing)

    from lanternpp.api.model import model_folder

    folder = model_folder(options.model)
    given_prompts = read_file(prompts)
    images = None if draws else gallery(Path(source), clip)
    quality = make_measurer(folder, reference, features, clip, options.device)
    if images is not None:
        from lanternpp.api.pipeline import versions

        figures = measure(quality, images, images.prompts)
        row: dict[str, Any] = {"folder": source, "images": len(images), "versions": versions()}
    else:
        from lanternpp.evaluation.draw import evaluation_requests
        from lanternpp.evaluation.prompts import read_prompts

        planned = evaluation_requests(
            given_prompts or quality.prompts or read_prompts(None, folder), n or DRAWN, seed
        )
        pictures, stats = drawn(read(options), planned, options, output)
        figures = measure(quality, pictures, [order.prompt for order in planned])
        row = stats.to_json() | {"folder": None if output is None else str(output)}
    against = quality.against
    row |= {"features": quality.features} | figures
    row |= {"reference": against and against.name, "reference_images": against and len(against.features)}
    if as_json:
        typer.echo(json.dumps(row))
        return
    show(source, row, figures)


def read_file(path: Path | None) -> list[str]:
    """The prompts of a file; none where there is no file."""
    from lanternpp.evaluation.prompts import read_prompts

    return [] if path is None else read_prompts(path, path.parent)


def images_folder(source: str, drawing: Mapping[str, Any]) -> None:
    """Raise InputError unless `source` is a folder, or where options of drawing are given with it."""
    if not Path(source).is_dir():
        raise InputError(unknown("method", source, [*METHODS, AUTO]) + "; or give a folder of pictures")
    given = [name for name, value in drawing.items() if value is not None]
    if given:
        spoken = DIALS[given[0]].option if given[0] in DIALS else f"--{given[0]}"
        named = "-n" if given[0] == "n" else spoken
        raise InputError(f"{named} is for drawing, and {source} is a folder of pictures; leave it out")


def gallery(folder: Path, clip: str | None) -> Gallery:
    """The pictures of a folder; with --clip, some must have a prompt."""
    from lanternpp.evaluation.pictures import Gallery
    from lanternpp.evaluation.quality import LEAST

    pictures = Gallery.read(folder, LEAST, one_size=True)
    if clip and not any(pictures.prompts):
        raise InputError(f"no picture in {folder} has a prompt; --clip compares pictures with their prompts")
    return pictures


def empty(folder: Path | None) -> None:
    """Raise InputError unless the folder is new or empty and can be written: other pictures in it would be measured too."""
    if folder is None:
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"output {str(folder)!r} is not empty; name a new folder")
    png_path(folder / "0.png", overwrite=True)


def make_measurer(
    folder: Path, reference: Path | None, features: str | None, clip: str | None, device: str
) -> Quality:
    """What measures the pictures; made before any is drawn, so that mistakes are reported first."""
    from lanternpp.evaluation.quality import Quality

    with progress_bar("reading the reference") as progress:
        return Quality.for_model(folder, reference, features, clip, device, progress)


def measure(quality: Quality, images: Any, prompts: list[str | None] | list[str]) -> dict[str, float]:
    """The figures of some pictures."""
    with progress_bar("measuring") as progress:
        return quality.measure(images, prompts, progress)


def drawn(
    pipe: Pipeline, planned: list[EvaluationRequest], options: DrawOptions, folder: Path | None
) -> tuple[list[Any], Stats]:
    """Draw pictures and, where there is a folder, save each as it is drawn; the pictures and the figures of drawing."""
    from lanternpp.api.picture import notes, save_png
    from lanternpp.evaluation.draw import combined_stats, draw

    images: list[Any] = []
    parts: list[Stats] = []
    with progress_bar("drawing") as progress:
        for part, result in draw(pipe, planned, options.method, progress, **options.overrides):
            stats = result.stats
            for order, image in zip(part, result.images, strict=True):
                if folder is not None:
                    chunks = notes(order.prompt, order.seed, stats.model, stats.settings, stats.versions)
                    save_png(image, folder / f"{len(images):05d}.png", chunks)
                images.append(image)
            parts.append(stats)
    return images, combined_stats(parts)


FIGURES = {
    "frechet": ("Fréchet distance", "0 is the same; depends on the number of pictures"),
    "precision": ("precision", "share of the pictures that look like the reference"),
    "recall": ("recall", "share of the reference that looks like some picture"),
    "prompt_accuracy": ("prompt accuracy", "share of the pictures that show what their prompt names"),
    "clip": ("CLIP score", "agreement with the prompt, at most 100"),
}


def show(source: str, row: dict[str, Any], figures: dict[str, float]) -> None:
    """The figures as a table on stdout."""
    title = f"{source}: {row['images']} pictures"
    if row["reference"]:
        title += f" beside {row['reference']} ({row['reference_images']}), seen by {row['features']}"
    rows = [
        (label, figure_text(name, figures), about)
        for name, (label, about) in FIGURES.items()
        if name in figures
    ]
    if "codes_per_pass" in row:
        rows.append(("codes per pass", f"{row['codes_per_pass']:.2f}", "of the method that drew them"))
        rows.append(
            ("seconds per picture", f"{row['seconds_per_image']:.2f}", "a batch at a time; see bench")
        )
    show_table(("figure", "value", "what it is"), rows, title, left=(0, 2), prose=True)


def figure_text(name: str, figures: dict[str, float]) -> str:
    """A figure as text: shares in per cent, the Fréchet distance with its standard error."""
    value = figures[name]
    if name == "frechet":
        return f"{value:.3g} ± {figures['frechet_spread']:.1g}"
    return f"{value:.1f}" if name == "clip" else f"{100 * value:.1f} %"
