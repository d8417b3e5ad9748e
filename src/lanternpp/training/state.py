"""The base class of trainings, the state from which a killed run resumes without a difference in its result, the log, lines on stderr."""

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
from lanternpp.nn.files import wrong_file
from lanternpp.training.options import TrainingOptions
from lanternpp.util import files
from lanternpp.util.jsonfile import append_row, differences, keep_rows
from lanternpp.util.terminal import Progress, progress_bar

STATE, LOG = "state.pt", "log.jsonl"
WRONG, RESTART = "is no state of this training", "pass --restart to start over"
MEANINGS = {
    "data": ", which stands for the training data",
    "target": ", which stands for the target's weights",
    "redrawn_data": ", which stands for the pictures as its tokenizer draws them",
}
PAUSE = 10  # seconds between two lines of a report
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
    first_weights: str | None = None  # which of them were taken from another model and which are new
    keep: str | None = None  # the validation figure whose least value decides which average is exported

    @abstractmethod
    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update of `model`; returns scalars still on the device."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Figures of `average` on held-out data."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors of `average`, as a model folder holds them."""

    def modules(self) -> dict[str, nn.Module]:
        """Everything a resumed run needs the weights of."""
        return {"model": self.model, "average": self.average}

    def parts(self) -> dict[str, dict[str, Any]]:
        """Modules and optimizers by name, whose state a resumed run needs."""
        return {"modules": self.modules(), "optimizers": self.optimizers}

    # A subclass may leave these as they are.
    # ruff: noqa: B027

    def sample(self, path: Path) -> None:
        """Write a PNG of pictures by `average`, where there are some to show."""

    def speed_up(self) -> None:
        """Compile the parts that are faster for it."""
        self.model.compile()

    def final(self) -> dict[str, Any]:
        """More figures for the provenance, measured once at the end."""
        return {}

    def param_groups(self) -> Iterator[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        for optimizer in self.optimizers.values():
            yield from optimizer.param_groups


def averaged(model: M) -> M:
    """A copy of a model to hold its moving average."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@dataclass
class State:
    """How far a run has come. Data order and noise are functions of (seed, step), so the step is enough of them."""

    step: int = 0
    seconds: float = 0.0
    checked: int = 0
    best: dict[str, Any] | None = None  # {"figure", "step", "weights"} where the task keeps its best
    sums: dict[str, Tensor] = field(default_factory=dict)  # of the losses since the log was last written
    counted: int = 0

    def write(self, task: Task, folder: Path) -> None:
        """Write all that a resumed run needs."""
        states = {
            part: {name: x.state_dict() for name, x in named.items()} for part, named in task.parts().items()
        }
        content = {"settings": task.settings, "state": vars(self), **states}
        checkpoints.write_pt(folder / STATE, content)


def begin_or_resume(task: Task, options: TrainingOptions) -> State:
    """A new state, or the one saved in the folder. InputError where that was trained with other settings."""
    path = options.folder / STATE
    files.sweep(options.folder)
    if options.restart or not path.exists():
        for group in task.param_groups():
            group["initial_lr"] = group["lr"]
        # Left by a run that is started over, or that was killed before its first state.
        for left in (path, options.folder / LOG):
            left.unlink(missing_ok=True)
        return State()
    content = read_state(path, task.settings)
    with wrong_file(f"{path} {WRONG}", RESTART):
        for part, named in task.parts().items():
            for name, x in named.items():
                x.load_state_dict(content[part][name])
        state = State(**content["state"])
        # The budget or the number of checks may be another one now.
        due = int(options.progress(state.step, state.seconds) * options.checks)
        state.checked = min(state.checked, due)
        state.sums = {name: value.to(task.device) for name, value in state.sums.items()}
    # Without the rows that a killed run wrote after its last saved step.
    keep_rows(options.folder / LOG, lambda row: row.get("step", 0) <= state.step)
    return state


def check_resumable(options: TrainingOptions, known: Mapping[str, Any]) -> None:
    """InputError where the folder's state was trained with other settings than those known so far."""
    path = options.folder / STATE
    if not options.restart and path.exists():
        read_state(path, known, partly=True)


def read_state(path: Path, known: Mapping[str, Any], partly: bool = False) -> dict[str, Any]:
    """The content of a state. InputError where it is damaged, or its settings differ from those known, which it names.

    partly: not all settings are known yet, and the tensors, memory-mapped, are not read.
    """
    content = dict[str, Any]()
    with suppress(InputError):
        content = checkpoints.read_pt(path, mmap=partly)
    if not isinstance(old := content.get("settings"), dict):
        raise InputError(f"{path} {WRONG}: {RESTART}.")
    found = differences({name: old.get(name) for name in known} if partly else old, dict(known))
    if changed := [said + MEANINGS.get(said.partition(" ")[0], "") for said in sorted(found)]:
        # what the tokenizer draws is no option
        repeat = "" if changed[0].startswith("redrawn_data ") else "repeat its settings to resume, or "
        raise InputError(f"{path} was trained with other settings ({'; '.join(changed)}): {repeat}{RESTART}.")
    return content


class Report:
    """Progress on stderr, a line every ten seconds and on a terminal a bar, and the rows of `log.jsonl`.

    silent: print and write nothing, as another process does.
    """

    def __init__(self, name: str, folder: Path, silent: bool = False):
        self.name, self.log, self.silent = name, folder / LOG, silent
        self._move: Progress | None = None
        self._last = time.monotonic()
        self._first: tuple[float, float] | None = None  # (progress, seconds) where this process began

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar while a run lasts."""
        with nullcontext() if self.silent else progress_bar(self.name) as self._move:
            yield

    def advance(self, seconds: float, progress: float, line: str, last: bool = False) -> None:
        """Move the bar to `progress`, 0..1, after so many seconds, and print the line if it is due or the last one."""
        self._first = self._first or (progress, seconds)
        if self._move is not None:
            self._move(round(1000 * progress), 1000)
        if last or time.monotonic() - self._last > PAUSE:
            gone, since = progress - self._first[0], seconds - self._first[1]
            left = f"  {(1 - progress) * since / gone / 60:.1f} min left" if gone > 0 and progress < 1 else ""
            self.say(f"{100 * progress:5.1f} %{left}  {line}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._last = time.monotonic()
        if not self.silent:
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row to the log."""
        if not self.silent:
            append_row(self.log, row)
