"""What `lanternpp generate` does with a file of prompts: its options, its checks and its summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lanternpp.arguments import DrawOptions
from lanternpp.cli import options as opt
from lanternpp.cli.output import figures, writable_folder
from lanternpp.cli.terminal import progress_bar, tell_effect
from lanternpp.errors import InputError

if TYPE_CHECKING:
    from lanternpp.many.job import Totals
    from lanternpp.many.painter import Painter
    from lanternpp.many.pool import Pool

_many = partial(typer.Option, rich_help_panel="Many pictures")
ray_option = partial(typer.Option, rich_help_panel="Ray")

Prompts = Annotated[Path | None, _many(metavar="FILE", help="Draw every line of this file; needs --out.")]
Out = Annotated[Path | None, _many(metavar="DIR", help="Where --prompts writes its PNGs.")]
Overwrite = Annotated[
    bool, _many("--overwrite", help="Replace pictures that were drawn with other settings.")
]
Ray = Annotated[
    str | None,
    ray_option(
        "--ray",
        metavar="[local|auto|HOST:PORT]",
        help="Use Ray: on this machine (local, the default), on the cluster it is part of (auto), or on the one at an "
        "address. Needs lanternpp\\[ray].",
    ),
]
Actors = Annotated[
    int | None,
    ray_option(
        metavar="N",
        help="Workers of Ray; default: one for each GPU, else one for every four cores.",
        callback=opt.within(1, 10_000),
    ),
]


@dataclass(frozen=True)
class Asked:
    """The options of a job, as they were given."""

    prompts: Path | None
    out: Path | None
    overwrite: bool
    ray: str | None
    actors: int | None

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
        given = {"--out": self.out, "--ray": self.ray, "--actors": self.actors}
        for option, value in given.items():
            if value is not None:
                raise InputError(
                    f"{option} goes with --prompts FILE; leave it out, or put the prompt in a file"
                )
        return False

    def check(self) -> None:
        """InputError where the folder cannot be written or Ray cannot be reached by such an address."""
        if self.out is None:
            raise InputError(f"--prompts {self.prompts} needs a folder to write to; add --out DIR")
        writable_folder(self.out)
        check_ray(self.ray)
        if self.ray is None and self.actors is not None:
            raise InputError(f"--actors {self.actors} are workers of Ray; add --ray")


def check_ray(address: str | None) -> None:
    """InputError where Ray was asked for and is not installed, or cannot be at such an address."""
    if address is not None:
        from lanternpp.cluster import check_address, require

        check_address(address)
        require()


def draw(asked: Asked, n: int, seed: int, as_json: bool, options: DrawOptions) -> None:
    """Do the job and print its summary. Raises InputError."""
    assert asked.prompts and asked.out
    from lanternpp.evaluation.prompts import read_prompts
    from lanternpp.many.job import run
    from lanternpp.many.lock import locked
    from lanternpp.many.orders import orders

    wanted = orders(read_prompts(asked.prompts, asked.prompts), n, seed)
    with locked(asked.out), painters(asked, placed(options)) as painter, progress_bar("drawing") as progress:
        tell_effect(painter.effect)
        totals = run(painter, wanted, asked.out, asked.prompts, asked.overwrite, progress)
    if as_json:
        typer.echo(json.dumps(totals.to_json() | {"folder": str(asked.out)}))
    else:
        typer.echo(summary(totals, asked.out))


@contextmanager
def painters(asked: Asked, options: DrawOptions) -> Iterator[Painter | Pool]:
    """Who draws: this process, or workers of Ray."""
    if asked.ray is None:
        from lanternpp.many.painter import Painter

        yield Painter(options)
        return
    from lanternpp.many.pool import pool

    with pool(asked.ray, asked.actors, options) as workers:
        yield workers


def placed(options: DrawOptions) -> DrawOptions:
    """With the paths of models in full, for a worker that runs elsewhere; names and hub ids as they are."""
    from lanternpp.models import MODELS

    def place(named: str) -> str:
        return named if named in MODELS or not Path(named).exists() else str(Path(named).absolute())

    return replace(options, model=place(options.model), drafter=options.drafter and place(options.drafter))


def summary(totals: Totals, folder: Path) -> str:
    """One line for a reader."""
    if totals.codes_per_pass is None:
        return f"{folder}: nothing to draw, all {totals.skipped} pictures are there"
    had = [f"{totals.skipped} were there already"] if totals.skipped else []
    return f"{folder}: {', '.join([f'{totals.drawn} pictures', *had, *figures(totals.to_json())])}"
