"""What the scripts of the stages share: the options of a run, and how a script ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from lanternpp.cli.output import writable_folder
from lanternpp.cli.terminal import one_line_warnings, say
from lanternpp.errors import InputError
from lanternpp.nn.stores import Store
from lanternpp.training.hardware import pick
from lanternpp.training.run import TrainingOptions

Flat = Parameter(name="*")


def about(text: str) -> Parameter:
    """The help of an option."""
    return Parameter(help=text)


Data = Annotated[Path, about("Imagefolder with train/ and val/, each with metadata.jsonl.")]
Model = Annotated[Path, about("Model folder to write to.")]
Limit = Annotated[int | None, about("Use only this many pictures of each split.")]
Crops = Annotated[int, about("Crops of each training picture, each also mirrored; encoded once.")]


@dataclass(frozen=True)
class Run:
    """How long, where and how to train: what may change between a run and its resumption."""

    steps: Annotated[int | None, about("Budget in steps, earlier runs counted in.")] = None
    minutes: Annotated[float | None, about("Budget in minutes, earlier runs and validations counted in.")] = (
        None
    )
    device: Annotated[str, about("auto, cpu, cuda or cuda:N.")] = "auto"
    compile: Annotated[bool, about("Compile the networks.")] = False
    restart: Annotated[bool, about("Start over instead of going on from a saved state.")] = False
    checks: Annotated[int, about("Validations, samples and saved states over the run.")] = 12
    store: Annotated[Store, about("Weights on disk: float32, bfloat16, or 8 or 6 bits a number.")] = "float32"

    def options(self, folder: Path) -> TrainingOptions:
        """The options of a training that writes to `folder`."""
        return TrainingOptions(
            writable_folder(folder),
            self.steps,
            self.minutes,
            self.restart,
            pick(self.device),
            self.compile,
            self.checks,
            store=self.store,
        )


def script(stage: Callable[..., bool], args: list[str] | None = None) -> None:
    """Run a stage with the options on the command line; then exit: 2 after a mistake, 130 where it was stopped."""
    app = App(help=stage.__doc__, result_action="return_value", version_flags=[])
    app.default(stage)
    try:
        with one_line_warnings():
            finished: Any = app(args, exit_on_error=False, print_error=False)
    except (InputError, CycloptsError) as error:
        say("error", error)
        sys.exit(2)
    sys.exit(130 if finished is False else 0)
