"""`lanternpp train`: a drafter for a target."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from lanternpp.cli import options as opt
from lanternpp.training.options import DrafterSettings, Kind, TrainingData, TrainingOptions
from lanternpp.util.options import Option
from lanternpp.util.terminal import progress_bar


@opt.verb
def train(
    *,
    model: Annotated[str, Option("The target, a recipe's or published.", metavar="NAME|DIR|HUB_ID")],
    kind: Kind = "parallel",
    out: Annotated[Path | None, opt.Folder] = None,
    source: TrainingData = TrainingData(),
    settings: DrafterSettings = DrafterSettings(),
    training: TrainingOptions = TrainingOptions(),
) -> int | None:
    """Train a drafter for a target, on pictures, on the target's own, or on codes.

    The same command resumes a training that was stopped.

    kind: parallel: all levels of a draft in one pass; eagle: a code at a time, as in EAGLE's paper.
    out: Where the drafter goes; default: drafter/ or parallel/ in MODEL.
    """
    from lanternpp.models.base import PromptWarning
    from lanternpp.training import drafter as drafters
    from lanternpp.training.eagle import EagleTask
    from lanternpp.training.rollouts import ParallelTask, RolloutTask
    from lanternpp.training.teacher import drafter_folder

    settings = settings.of(kind)
    source.check(kind)
    training.check()
    folder = opt.writable_folder(drafter_folder(model, out, kind, source.drafter, training.restart))
    task = EagleTask if kind == "eagle" else ParallelTask if source.rollouts is None else RolloutTask
    with warnings.catch_warnings():
        if source.prompts is None:
            warnings.simplefilter("ignore", PromptWarning)  # of captions, which may be thousands
        prompts = drafters.train(model, task, settings, source, folder, training)
    if not prompts:
        return 130  # as a shell expects after an interrupt
    store_rates(model, out, folder, kind, prompts, training.device)
    return None


def store_rates(
    model: str, out: Path | None, folder: Path, kind: Kind, prompts: Sequence[str], device: str
) -> None:
    """Count and store the acceptance rates of a drafter, by which drafts are fitted to a machine; print the command that draws with it.

    prompts: of the pictures that are drawn to count.
    """
    from lanternpp.api.pipeline import Pipeline
    from lanternpp.api.rates import FILE
    from lanternpp.models.base import PromptWarning
    from lanternpp.training.drafter import record_rates, strengths
    from lanternpp.training.team import team

    if not team().leads:
        return
    pipe = Pipeline.from_pretrained(model, out, device=device, tuned=False)
    purpose = "" if pipe.target.channels else f", for {folder / FILE}"
    print(f"counting how many drafted codes are accepted{purpose}", file=sys.stderr)
    with progress_bar("counting accepted codes") as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", PromptWarning)  # of captions, as in the training
        codes_per_pass = record_rates(pipe, strengths(pipe, kind), folder, prompts, progress=progress)
    rates = ", ".join(f"{name} {codes:.2f}" for name, codes in codes_per_pass.items())
    print(f"codes per pass: {rates or 'no draft fits into a picture'}", file=sys.stderr)
    drafter = ["--drafter", str(out)] if out else []
    words = ["lanternpp", "compare", "PROMPT", "--model", model, *drafter, "--method", kind]
    print(f"draw with it: {shlex.join(words)}", file=sys.stderr)
