"""`lanternpp generate`: pictures from a prompt, or from a file of prompts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lanternpp.api.options import DrawOptions, check_prompt, device_text, drawn_with
from lanternpp.cli import options as opt
from lanternpp.errors import InputError, counted
from lanternpp.util.files import locked, slug
from lanternpp.util.options import Option
from lanternpp.util.terminal import progress_bar, say


@dataclass(frozen=True)
class JobOptions:
    """Pictures to show, the output, and a job of many prompts.

    image: A picture that the prompt shows, for models that edit; may be repeated.
    output: Where to write: a PNG, or a folder with --prompts.
    prompts: Draw every line of this file; needs -o FOLDER.
    """

    heading = "Options"
    image: Annotated[list[Path] | None, Option(metavar="FILE")] = None
    output: Annotated[Path | None, Option(names=("-o", "--output"), metavar="FILE.png|FOLDER")] = None
    ray: opt.Ray = None
    actors: Annotated[int | None, opt.workers("Workers of Ray")] = None
    prompts: Annotated[Path | None, Option(metavar="FILE", group="Many pictures")] = None
    overwrite: opt.Overwrite = False

    def is_job(self, prompt: str | None) -> bool:
        """Return whether a file of prompts is to be drawn, not one prompt; raise InputError for both, neither, or a wrong output."""
        is_job = self.prompts is not None
        if is_job == (prompt is not None):
            raise InputError("give either a PROMPT, or --prompts FILE -o FOLDER")
        others = {"--image": self.image} if is_job else {"--ray": self.ray, "--actors": self.actors}
        for option, value in others.items():
            if value is not None:
                owner = "one PROMPT" if is_job else "--prompts FILE"
                raise InputError(f"{option} goes with {owner}; leave it out, or draw with {owner}")
        if is_job:
            if self.output is None or self.output.suffix.lower() == ".png":
                given = "" if self.output is None else f", and {self.output} is one picture"
                raise InputError(f"--prompts {self.prompts} needs a folder to write to{given}; add -o FOLDER")
            opt.writable_folder(self.output)
            opt.check_ray(self.ray, "--actors", self.actors)
        return is_job


@opt.verb
def generate(
    prompt: Annotated[str | None, Option("What to draw.", validate=check_prompt)] = None,
    /,
    *,
    n: opt.Count = 1,
    job: JobOptions = JobOptions(),
    as_json: opt.Json = False,
    options: DrawOptions = DrawOptions(),
    seed: opt.Seed = 0,
) -> int | None:
    """Draw pictures of PROMPT: one PNG, a grid where there are several.

    Without -o the file is out/PROMPT-SEED.png. A picture there that was drawn with other settings stays, and the name of
    the new one gets a number; --overwrite replaces it. -o replaces a picture of lanternpp, and with --overwrite any file.
    An interrupt leaves a grid of the pictures that were finished.

    With --prompts FILE -o FOLDER: -n pictures of every line of the file, a PNG each. Pictures that the folder has are not
    drawn again, so the same command resumes an interrupted job.
    """
    if job.is_job(prompt):
        opt.check(options)
        draw_job(job, n, seed, as_json, options)
        return None
    assert prompt is not None
    path = job.output or Path("out") / f"{slug(prompt)}-{seed}.png"
    opt.png_path(path, job.overwrite or job.output is None)
    opt.check(options)

    from lanternpp.api.calls import pictures
    from lanternpp.api.picture import digests, grid, save_png
    from lanternpp.api.results import UnfinishedError

    images = pictures(job.image) if job.image else None
    pipe = opt.read(options)
    finished: list[int] | None = None
    try:
        with progress_bar("drawing") as progress:
            result = pipe(
                prompt,
                n=n,
                seed=seed,
                method=options.method,
                progress=progress,
                image=images,
                **options.overrides,
            )
    except UnfinishedError as unfinished:
        result, finished = unfinished.result, unfinished.seeds
    stats = result.stats
    chunks = stats.notes(prompt, seed, stats.images)
    chunks |= {"seeds": " ".join(map(str, finished))} if finished else {}
    chunks |= {"shown": digests(images)} if images else {}
    path = path if job.output or job.overwrite else free_path(path, chunks)
    save_png(grid(result.images), path, chunks)
    if finished:
        say("interrupted", f"{len(finished)} of {n} pictures were finished; they are in {path}")
        return 130
    if as_json:
        print(json.dumps(stats.to_json() | {"file": str(path)}))
    else:
        print(f"{path}: {', '.join(figures(stats.to_json()))}")
    opt.advise(pipe, stats.settings, options)
    return None


def draw_job(job: JobOptions, n: int, seed: int, as_json: bool, options: DrawOptions) -> None:
    """Draw the pictures of a file of prompts and print a summary; raise InputError."""
    assert job.prompts and job.output
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.jobs.job import drawn_settings, plan_images, run
    from lanternpp.jobs.renderer import Renderer
    from lanternpp.jobs.workers import worker_pool

    planned = plan_images(read_prompts(job.prompts, job.prompts), n, seed)
    options, folder = opt.for_workers(options), job.output
    with (
        locked(folder),
        worker_pool(job.ray, job.actors, options, drawn_settings(folder, planned))
        if job.ray
        else nullcontext(Renderer(options, drawn_settings=drawn_settings(folder, planned))) as renderer,
        progress_bar("drawing") as progress,
    ):
        if renderer.info.effect:
            say("int8", renderer.info.effect)
        stats, skipped = run(renderer, planned, folder, job.prompts, job.overwrite, progress)
    row = stats.to_json() | {"skipped": skipped, "folder": str(folder)}
    if not stats.images:
        row["seconds_per_image"] = None
    if as_json:
        print(json.dumps(row))
    elif not stats.images:
        print(f"{folder}: nothing to draw, it has {counted(skipped, 'picture')} already")
    else:
        existing = f" {skipped} already there," if skipped else ""
        print(f"{folder}: {counted(stats.images, 'picture')},{existing} {', '.join(figures(row))}")


def free_path(path: Path, notes: Mapping[str, str]) -> Path:
    """Return the first of PATH, PATH-2, PATH-3 ... that does not exist, or whose pictures are all in the PNG with these notes."""
    from lanternpp.api.picture import png_notes
    from lanternpp.jobs.job import differences

    candidate = path
    for number in itertools.count(2):
        existing = (png_notes(candidate) or {}) if candidate.exists() else dict(notes)
        same_settings = not differences(existing | {"images": notes["images"]}, notes)
        if same_settings and _seeds(existing) <= _seeds(notes):
            break
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


def _seeds(notes: Mapping[str, str]) -> set[int]:
    try:
        seed, count = int(notes["seed"]), int(notes["images"])
        return set(map(int, notes.get("seeds", "").split())) or set(range(seed, seed + count))
    except (KeyError, ValueError):
        return {-1}


def figures(row: Mapping[str, Any]) -> list[str]:
    """Return the figures of `Stats.to_json` as phrases."""
    settings, tv_cost = row["settings"], row["tv_cost"]
    method = drawn_with(row["method"], row["auto"], settings)
    phrases = [
        f"{row['seconds_per_image']:.2f} s per picture on {device_text(settings)} with {method}",
        f"{row['codes']} codes in {row['passes']} passes",
        f"{row['codes_per_pass']:.2f} codes per pass",
    ]
    if settings["measure_tv"]:
        cost = "cannot be measured" if tv_cost is None else f"{tv_cost:.2f} per picture"
        phrases.append(f"total variation {cost}")
    return phrases
