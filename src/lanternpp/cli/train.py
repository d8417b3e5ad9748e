"""`lanternpp train`: a drafter for a target."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from lanternpp.cli import options as opt
from lanternpp.cli.output import writable_folder
from lanternpp.errors import InputError
from lanternpp.training.options import DrafterSettings, Kind, TrainingData, TrainingOptions
from lanternpp.util.options import Option


@opt.verb
def train(
    *,
    model: Annotated[str, Option("The target, a recipe's or published.", metavar="NAME|DIR|HUB_ID")],
    kind: Annotated[
        Kind, Option("eagle: a code at a time; parallel: all levels of a draft in one pass.")
    ] = "eagle",
    out: Annotated[
        Path | None,
        opt.folder("Where the drafter goes; default: drafter/ or parallel/ in MODEL."),
    ] = None,
    cache_features: Annotated[
        bool, Option("Keep the target's features on disk; takes room, saves its passes.", group="EAGLE")
    ] = False,
    rollouts: Annotated[
        int | None,
        Option(
            "Go on with a parallel drafter, on N runs of the target with it, recorded first.",
            ge=1,
            metavar="N",
            group="Parallel",
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        Option("--rollouts: the parallel drafter to go on with.", metavar="DIR", group="Parallel"),
    ] = None,
    method: Annotated[
        str,
        Option(
            "--rollouts: the method by whose rule and verification runs are drawn.",
            metavar="NAME",
            group="Parallel",
        ),
    ] = "parallel",
    source: TrainingData = TrainingData(),
    settings: DrafterSettings = DrafterSettings(),
    training: Annotated[
        TrainingOptions, opt.Without(("folder", "log_steps", "stop_after"))
    ] = TrainingOptions(),
) -> int | None:
    """Train a drafter for a target, on pictures, on what the target draws, or on codes.

    The same command resumes a training that was stopped.
    """
    from dataclasses import replace

    from lanternpp.training import drafter as drafters
    from lanternpp.training import rollouts as runs
    from lanternpp.training.eagle import EagleTask
    from lanternpp.training.parallel import ParallelTask
    from lanternpp.training.teacher import drafter_folder

    settings = settings.of(kind)
    for option, value in (("--rollouts", rollouts), ("--drafter", drafter)):
        if value is not None and kind == "eagle":
            raise InputError(f"{option} is for drafters of --kind parallel: leave it out.")
    if cache_features and kind == "parallel":
        raise InputError("--cache-features is for drafters of --kind eagle: leave it out.")
    if (rollouts is None) != (drafter is None) or (rollouts is None and method != "parallel"):
        raise InputError(
            "--rollouts N goes on with the drafter of --drafter DIR, drawn by --method: give both."
        )
    source.check()
    training.check()
    folder = drafter_folder(model, out, "drafter" if kind == "eagle" else kind)
    options = replace(training, folder=writable_folder(folder))
    if rollouts is not None and drafter is not None:
        finished = runs.train(model, drafter, settings, source, options, rollouts, method)
    elif kind == "parallel":
        finished = drafters.train(model, ParallelTask, settings, source, options)
    else:
        finished = drafters.train(model, EagleTask, settings, source, options, cache=cache_features)
    if not finished:
        return 130  # as a shell expects after an interrupt
    store_rates(model, out, folder, kind)
    return None


def store_rates(model: str, out: Path | None, folder: Path, kind: Kind) -> None:
    """Count and store the acceptance rates of a drafter, by which drafts are fitted to a machine; say which command draws with it."""
    from lanternpp.api.pipeline import Pipeline
    from lanternpp.cli.terminal import progress_bar
    from lanternpp.evaluation.prompts import usual_conditions
    from lanternpp.training.loop import team
    from lanternpp.training.rates import record, strengths

    if not team().leads:
        return
    pipe = Pipeline.from_pretrained(model, out, tuned=False)
    with progress_bar("counting what is accepted") as progress:
        found = record(
            pipe, strengths(pipe, kind), folder, usual_conditions(pipe.folder, pipe.target), progress=progress
        )
    rates = ", ".join(f"{name} {codes:.2f}" for name, codes in found.items())
    print(f"codes per pass: {rates or 'no draft fits into a picture'}", file=sys.stderr)
    other = ["--drafter", str(out)] if out else []
    words = ["lanternpp", "compare", "PROMPT", "--model", model, *other, "--method", kind]
    print(f"draw with it: {shlex.join(words)}", file=sys.stderr)
