"""The base class of trainings, the state from which a killed run resumes with the same result, the log, and progress on stderr."""

from __future__ import annotations

import copy
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.files import input_errors
from lanternpp.training.options import TrainingOptions
from lanternpp.util import files
from lanternpp.util.jsonfile import append_row, differences, keep_rows
from lanternpp.util.terminal import Progress, progress_bar

STATE, LOG = "state.pt", "log.jsonl"
NO_STATE, RESTART = "is no state of this training", "pass --restart to start over"
MEANINGS = {
    "data": ", which stands for the training data",
    "target": ", which stands for the target's weights",
    "redrawn_data": ", which stands for the pictures as its tokenizer draws them",
}
REPORT_SECONDS = 10  # between two lines of a report
M = TypeVar("M", bound=nn.Module)


class Task(ABC):
    """The base class of trainings. `settings` are the values that a resumed run must share."""

    name: str
    device: torch.device
    settings: dict[str, Any]
    data: dict[str, Any]  # for the provenance
    model: nn.Module  # trained
    average: nn.Module  # its moving average: validated and exported
    optimizers: dict[str, torch.optim.Optimizer]
    decay: float = 0.999
    warmup: int = 200
    # Share of the budget over which the rate falls to zero; None: a cosine over all of it.
    cooldown: float | None = None
    first_weights: str | None = None  # says which weights were taken from another model
    keep: str | None = None  # the validation figure whose minimum decides which average is exported

    @abstractmethod
    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """Update `model` once; return scalars for the log, still on the device."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Return figures of `average` on held-out data."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config and tensors of `average`, as a model folder holds them."""

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules whose weights a resumed run needs, by name."""
        return {"model": self.model, "average": self.average}

    def parts(self) -> dict[str, dict[str, Any]]:
        """Return the modules and optimizers whose state a resumed run needs, by name."""
        return {"modules": self.modules(), "optimizers": self.optimizers}

    # A subclass may leave these as they are.
    # ruff: noqa: B027

    def sample(self, path: Path) -> None:
        """Write a PNG of pictures drawn by `average`, where the task draws any."""

    def speed_up(self) -> None:
        """Compile the parts that are faster for it."""
        self.model.compile()

    def final(self) -> dict[str, Any]:
        """Return more figures for the provenance, measured once at the end."""
        return {}

    def param_groups(self) -> Iterator[dict[str, Any]]:
        """Yield the parameter groups of all optimizers."""
        for optimizer in self.optimizers.values():
            yield from optimizer.param_groups


def averaged(model: M) -> M:
    """Return a frozen copy of a model to hold its moving average."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@dataclass
class State:
    """The progress of a run. Data order and noise are functions of (seed, step), so their state is the step."""

    step: int = 0
    seconds: float = 0.0
    checked: int = 0  # the last check that was due, of `checks`
    best: dict[str, Any] | None = None  # {"figure", "step", "weights"} where the task keeps its best
    sums: dict[str, Tensor] = field(default_factory=dict)  # of the losses since the log was last written
    counted: int = 0  # steps in `sums`

    def write(self, task: Task, folder: Path) -> None:
        """Write the state, the settings, and the state of the task's modules and optimizers."""
        content = {"settings": task.settings, "state": vars(self)}
        for part, objects in task.parts().items():
            content[part] = {name: x.state_dict() for name, x in objects.items()}
        checkpoints.write_pt(folder / STATE, content)


def begin_or_resume(task: Task, options: TrainingOptions) -> State:
    """Return a new state, or the saved state of the folder; raise InputError where that was trained with other settings."""
    path = options.folder / STATE
    files.sweep(options.folder)
    if options.restart or not path.exists():
        for group in task.param_groups():
            group["initial_lr"] = group["lr"]
        # A run that is started over, or that was killed before its first state, has left these files.
        path.unlink(missing_ok=True)
        (options.folder / LOG).unlink(missing_ok=True)
        return State()
    content = read_state(path, task.settings)
    with input_errors(f"{path} {NO_STATE}", RESTART):
        for part, objects in task.parts().items():
            for name, x in objects.items():
                x.load_state_dict(content[part][name])
        state = State(**content["state"])
        # The budget or the number of checks may have changed.
        state.checked = min(state.checked, int(options.progress(state.step, state.seconds) * options.checks))
        state.sums = {name: value.to(task.device) for name, value in state.sums.items()}
    # A killed run may have written rows after its last saved step.
    keep_rows(options.folder / LOG, lambda row: row.get("step", 0) <= state.step)
    return state


def check_resumable(options: TrainingOptions, settings: Mapping[str, Any]) -> None:
    """Check that the folder's state, if any, was trained with these settings, which may be a part; raise InputError if not."""
    path = options.folder / STATE
    if not options.restart and path.exists():
        read_state(path, settings, partly=True)


def read_state(path: Path, settings: Mapping[str, Any], partly: bool = False) -> dict[str, Any]:
    """Return the content of a state; raise InputError where the file is damaged, or its settings are not these.

    partly: compare only the settings that are given, and leave the tensors, which are memory-mapped, unread.
    """
    content = dict[str, Any]()
    with suppress(InputError):
        content = checkpoints.read_pt(path, mmap=partly)
    if not isinstance(saved := content.get("settings"), dict):
        raise InputError(f"{path} {NO_STATE}: {RESTART}.")
    if partly:
        saved = {name: saved.get(name) for name in settings}
    if changes := sorted(differences(saved, dict(settings))):
        # The user cannot repeat the pictures that a tokenizer redraws, as they are no option.
        repeat = "" if changes[0].startswith("redrawn_data ") else "repeat its settings to resume, or "
        changes = [change + MEANINGS.get(change.partition(" ")[0], "") for change in changes]
        raise InputError(f"{path} was trained with other settings ({'; '.join(changes)}): {repeat}{RESTART}.")
    return content


class Report:
    """Progress on stderr, a line every ten seconds and on a terminal a bar, and the rows of `log.jsonl`.

    silent: print and write nothing, as all processes do but the first.
    """

    def __init__(self, name: str, folder: Path, silent: bool = False):
        self.name, self.log, self.silent = name, folder / LOG, silent
        self._move: Progress | None = None
        self._last_line = time.monotonic()
        self._start: tuple[float, float] | None = None  # (progress, seconds) where this process began

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar while the block runs."""
        with nullcontext() if self.silent else progress_bar(self.name) as self._move:
            yield

    def advance(self, seconds: float, progress: float, line: str, last: bool = False) -> None:
        """Move the bar to `progress`, 0..1, reached in `seconds`, and print the line if it is due or the last one."""
        self._start = self._start or (progress, seconds)
        if self._move is not None:
            self._move(round(1000 * progress), 1000)
        if last or time.monotonic() - self._last_line > REPORT_SECONDS:
            done, elapsed = progress - self._start[0], seconds - self._start[1]
            left = ""
            if done > 0 and progress < 1:
                left = f"  {(1 - progress) * elapsed / done / 60:.1f} min left"
            self.say(f"{100 * progress:5.1f} %{left}  {line}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._last_line = time.monotonic()
        if not self.silent:
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row to the log."""
        if not self.silent:
            append_row(self.log, row)
