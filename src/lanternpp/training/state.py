"""What is trained, and what a training writes besides its weights: the state that a killed run resumes from without a difference in its
result, the log, lines on stderr, and the provenance."""

from __future__ import annotations

import copy
import json
import platform
import shlex
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training.options import TrainingOptions
from lanternpp.util import files, runlog
from lanternpp.util.progress import Progress, progress_bar

STATE, LOG = "state.pt", "log.jsonl"
MEANINGS = {
    "data": ", which stands for what it learns from",
    "target": ", which stands for the target's weights",
}
PAUSE = 10  # seconds between two lines of a report
M = TypeVar("M", bound=nn.Module)


class Task(ABC):
    """What is trained. `settings` are the values that a resumed run must share."""

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

    # What a task may leave as it is.
    # ruff: noqa: B027

    def extra(self) -> dict[str, Any]:
        """Plain values a resumed run needs."""
        return {}

    def restore(self, extra: dict[str, Any]) -> None:
        """Take over what `extra` returned in the run that was stopped."""

    def sample(self, path: Path) -> None:
        """Write a PNG that shows what `average` does, if there is anything to show."""

    def speed_up(self) -> None:
        """Compile what is worth compiling."""
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
        parts: dict[str, dict[str, Any]] = {"modules": task.modules(), "optimizers": task.optimizers}
        states = {part: {name: x.state_dict() for name, x in named.items()} for part, named in parts.items()}
        content = {"settings": task.settings, "state": vars(self), "extra": task.extra(), **states}
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
    try:
        content = checkpoints.read_pt(path)
        old, new = content.get("settings", {}), task.settings
        check_settings(path, old, new, sorted(old.keys() | new.keys()))
        parts: dict[str, dict[str, Any]] = {"modules": task.modules(), "optimizers": task.optimizers}
        for part, named in parts.items():
            for name, x in named.items():
                x.load_state_dict(content[part][name])
        task.restore(content["extra"])
        state = State(**content["state"])
        state.sums = {name: value.to(task.device) for name, value in state.sums.items()}
    except InputError:
        raise
    except Exception as error:  # torch raises many kinds on a damaged file; the remedy is the same
        raise InputError(f"{path} is no state of this training: pass --restart to start over.") from error
    rewind(options.folder / LOG, state.step)
    return state


def check_resumable(options: TrainingOptions, known: Mapping[str, Any]) -> None:
    """InputError where the folder's state was trained with other settings than those known so far."""
    path = options.folder / STATE
    if not options.restart and path.exists():
        check_settings(path, checkpoints.read_pt(path).get("settings", {}), known, sorted(known))


def check_settings(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str]) -> None:
    """InputError that says which of the named settings differ."""
    changed = [
        f"{name} {old.get(name)!r} -> {new.get(name)!r}{MEANINGS.get(name, '')}"
        for name in names
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise InputError(
            f"{path} was trained with other settings ({'; '.join(changed)}): "
            "repeat its settings to resume, or pass --restart to start over."
        )


def rewind(log: Path, step: int) -> None:
    """Remove from a log the rows that a killed run wrote after its last saved step."""
    runlog.keep_rows(log, lambda row: row.get("step", 0) <= step)


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
            runlog.append(self.log, row)


def as_text(figures: Mapping[str, Any]) -> str:
    """`name value` of the numbers among some figures."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def write_provenance(folder: Path, facts: Mapping[str, Any], device: torch.device) -> None:
    """Write `provenance.json`: the command, data, settings and versions that the weights beside it come from."""
    cpu = f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
    origin = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
    }
    files.write_text(folder / "provenance.json", json.dumps({**origin, **facts}, indent=2) + "\n")


def revision() -> str | None:
    """The commit of the source, with + where files differ from it; None outside a checkout."""
    place = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": True, "timeout": 10}
    try:
        commit, changed = (
            subprocess.run(["git", *words], **place).stdout.strip()  # type: ignore[call-overload]
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")
