"""`lanternpp generate` with a file of prompts: its options, checks and summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lanternpp.api.options import DrawOptions
from lanternpp.cli.options import Overwrite
from lanternpp.cli.output import figures, writable_folder
from lanternpp.cli.terminal import progress_bar, tell_effect
from lanternpp.errors import InputError
from lanternpp.util.options import Option

if TYPE_CHECKING:
    from lanternpp.jobs.renderer import Renderer
    from lanternpp.jobs.workers import WorkerPool


@dataclass(frozen=True)
class RayOptions:
    """Whether Ray is used, and how."""

    ray: Annotated[
        str | None,
        Option(
            "Use Ray: on this machine (local, the default), on the cluster that it is part of (auto), or on the one at an "
            "address. Needs lanternpp[ray].",
            metavar="[local|auto|HOST:PORT]",
            group="Ray",
        ),
    ] = None


@dataclass(frozen=True)
class ManyOptions(RayOptions):
    """The options of a job, as they were given on the command line."""

    actors: Annotated[
        int | None,
        Option(
            "Workers of Ray; default: one for each GPU, else one for every four cores.",
            ge=1,
            le=10_000,
            metavar="N",
            group="Ray",
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        Option("Draw every line of this file; needs --out.", metavar="FILE", group="Many pictures"),
    ] = None
    out: Annotated[
        Path | None, Option("The folder for the PNGs of --prompts.", metavar="DIR", group="Many pictures")
    ] = None
    overwrite: Overwrite = False

    def is_job(self, prompt: str | None, output: Path | None) -> bool:
        """Whether this is a job and not one prompt. Raises InputError where it is both or neither."""
        if prompt is not None and self.prompts is not None:
            raise InputError(f"give either a prompt or --prompts {self.prompts}, not both")
        if self.prompts is not None:
            if output is not None:
                raise InputError(f"-o {output} names one file; with --prompts give a folder, --out DIR")
            return True
        if prompt is None:
            raise InputError("there is nothing to draw; give a PROMPT, or --prompts FILE --out DIR")
        for_jobs = {"--out": self.out, "--ray": self.ray, "--actors": self.actors}
        for option, value in for_jobs.items():
            if value is not None:
                raise InputError(
                    f"{option} goes with --prompts FILE; leave it out, or put the prompt in a file"
                )
        return False

    def check(self) -> None:
        """Raise InputError where the folder cannot be written, or the options of Ray are wrong."""
        if self.out is None:
            raise InputError(f"--prompts {self.prompts} needs a folder to write to; add --out DIR")
        writable_folder(self.out)
        check_ray(self.ray)
        if self.ray is None and self.actors is not None:
            raise InputError(f"--actors {self.actors} needs Ray; add --ray")


def check_ray(address: str | None) -> None:
    """Raise InputError where an address of Ray is given, and Ray is not installed or the address is malformed."""
    if address is not None:
        from lanternpp.jobs.cluster import check

        check(address)


def draw(given: ManyOptions, n: int, seed: int, as_json: bool, options: DrawOptions) -> None:
    """Do the job and print its summary. Raises InputError."""
    assert given.prompts and given.out
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.jobs.job import locked, run
    from lanternpp.jobs.plan import plan_images

    planned = plan_images(read_prompts(given.prompts, given.prompts), n, seed)
    with (
        locked(given.out),
        open_renderer(given, with_full_paths(options)) as renderer,
        progress_bar("drawing") as progress,
    ):
        tell_effect(renderer.info.effect)
        stats, skipped = run(renderer, planned, given.out, given.prompts, given.overwrite, progress)
    row = stats.to_json() | {"skipped": skipped, "folder": str(given.out)}
    if as_json:
        print(json.dumps(row))
    elif not stats.images:
        print(f"{given.out}: nothing to draw, all {skipped} pictures are there")
    else:
        there = [f"{skipped} were there already"] if skipped else []
        print(f"{given.out}: {', '.join([f'{stats.images} pictures', *there, *figures(row)])}")


@contextmanager
def open_renderer(given: ManyOptions, options: DrawOptions) -> Iterator[Renderer | WorkerPool]:
    """What draws the pictures: a model in this process, or workers of Ray."""
    if given.ray is None:
        from lanternpp.jobs.renderer import Renderer

        yield Renderer(options)
        return
    from lanternpp.jobs.workers import worker_pool

    with worker_pool(given.ray, given.actors, options) as workers:
        yield workers


def with_full_paths(options: DrawOptions) -> DrawOptions:
    """With absolute paths of models, for workers in other folders; names and hub ids stay as they are."""
    from lanternpp.api.model import MODELS

    def full(model: str) -> str:
        return model if model in MODELS or not Path(model).exists() else str(Path(model).absolute())

    return replace(options, model=full(options.model), drafter=options.drafter and full(options.drafter))
