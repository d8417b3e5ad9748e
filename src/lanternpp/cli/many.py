"""`lanternpp generate` with a file of prompts: a folder of pictures, drawn here or on Ray."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lanternpp.api.options import DrawOptions
from lanternpp.cli.options import Overwrite
from lanternpp.cli.output import figures, writable_folder
from lanternpp.cli.terminal import progress_bar, tell_effect
from lanternpp.errors import InputError
from lanternpp.util.options import Option

WHERE = (
    "Use Ray: on this machine (local, the default), on the cluster that it is part of (auto), or on the one at an "
    "address. Needs lanternpp[ray]."
)
ACTORS = "Workers of Ray; default: one for each GPU, else one for every four cores."


@dataclass(frozen=True)
class RayOptions:
    """Whether Ray is used, and which cluster."""

    ray: Annotated[str | None, Option(WHERE, metavar="[local|auto|HOST:PORT]", group="Ray")] = None

    def check(self) -> None:
        """Raise InputError where Ray is to be used, and is not installed or the address is malformed."""
        if self.ray is not None:
            from lanternpp.jobs import cluster

            cluster.check(self.ray)


@dataclass(frozen=True)
class JobOptions(RayOptions):
    """What makes a job of `generate`, and where the job is done."""

    actors: Annotated[int | None, Option(ACTORS, ge=1, le=10_000, metavar="N", group="Ray")] = None
    prompts: Annotated[
        Path | None,
        Option("Draw every line of this file; needs -o FOLDER.", metavar="FILE", group="Many pictures"),
    ] = None
    overwrite: Overwrite = False

    def is_job(self, prompt: str | None, output: Path | None) -> bool:
        """Whether this is a job and not one prompt. InputError where it is both or neither, or the output is wrong."""
        if self.prompts is None:
            if prompt is None:
                raise InputError("there is nothing to draw; give a PROMPT, or --prompts FILE -o FOLDER")
            for option, value in {"--ray": self.ray, "--actors": self.actors}.items():
                if value is not None:
                    raise InputError(
                        f"{option} goes with --prompts FILE; leave it out, or put the prompt in a file"
                    )
            return False
        if prompt is not None:
            raise InputError(f"give either a prompt or --prompts {self.prompts}, not both")
        if output is None:
            raise InputError(f"--prompts {self.prompts} needs a folder to write to; add -o FOLDER")
        if output.suffix.lower() == ".png":
            raise InputError(f"-o {output} names one file; with --prompts give a folder")
        writable_folder(output)
        self.check()
        if self.ray is None and self.actors is not None:
            raise InputError(f"--actors {self.actors} needs Ray; add --ray")
        return True


def draw(given: JobOptions, folder: Path, n: int, seed: int, as_json: bool, options: DrawOptions) -> None:
    """Do the job and print its summary. Raises InputError."""
    assert given.prompts
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.jobs.job import locked, run
    from lanternpp.jobs.plan import plan_images
    from lanternpp.jobs.renderer import Renderer
    from lanternpp.jobs.workers import worker_pool

    planned, options = (
        plan_images(read_prompts(given.prompts, given.prompts), n, seed),
        with_full_paths(options),
    )
    with (
        locked(folder),
        worker_pool(given.ray, given.actors, options)
        if given.ray
        else nullcontext(Renderer(options)) as renderer,
        progress_bar("drawing") as progress,
    ):
        tell_effect(renderer.info.effect)
        stats, skipped = run(renderer, planned, folder, given.prompts, given.overwrite, progress)
    row = stats.to_json() | {"skipped": skipped, "folder": str(folder)}
    if as_json:
        print(json.dumps(row))
    elif not stats.images:
        print(f"{folder}: nothing to draw, all {skipped} pictures are there")
    else:
        there = [f"{skipped} were there already"] if skipped else []
        print(f"{folder}: {', '.join([f'{stats.images} pictures', *there, *figures(row)])}")


def with_full_paths(options: DrawOptions) -> DrawOptions:
    """With absolute paths of models, for workers in other folders; names and hub ids stay as they are."""
    from lanternpp.api.model import MODELS

    def full(model: str) -> str:
        return model if model in MODELS or not Path(model).exists() else str(Path(model).absolute())

    return replace(options, model=full(options.model), drafter=options.drafter and full(options.drafter))
