"""The saved state of a training, from which a killed run resumes without a difference in its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training.task import Task, TrainingOptions, param_groups
from lanternpp.util import files, runlog
from lanternpp.util.schema import made

STATE, LOG = "state.pt", "log.jsonl"
MEANINGS = {
    "data": ", which stands for what it learns from",
    "target": ", which stands for the target's weights",
}


@dataclass
class State:
    """How far a run has come."""

    step: int = 0
    seconds: float = 0.0
    checked: int = 0
    best: dict[str, Any] | None = None  # {"figure", "step", "weights"} where the task keeps its best
    sums: dict[str, Tensor] = field(default_factory=dict)  # of the losses since the log was last written
    counted: int = 0


@dataclass(frozen=True)
class _Row:
    """What is read of a line of the log."""

    step: int = 0


def begin_or_resume(task: Task, options: TrainingOptions) -> State:
    """A fresh state, or the one saved in the folder; refused where that was trained with other settings."""
    path = options.folder / STATE
    files.sweep(options.folder)
    if options.restart or not path.exists():
        for group in param_groups(task):
            group["initial_lr"] = group["lr"]
        for left in (
            path,
            options.folder / LOG,
        ):  # of a run that is started over, or was killed before its first state
            left.unlink(missing_ok=True)
        return State()
    try:
        state = restore_state(path, checkpoints.read_pt(path), task, options)
    except InputError:
        raise
    except Exception as error:  # torch raises many kinds on a damaged file; the remedy is the same
        raise InputError(f"{path} is no state of this training: pass --restart to start over.") from error
    rewind(options.folder / LOG, state.step)
    return state


def restore_state(path: Path, content: Mapping[str, Any], task: Task, options: TrainingOptions) -> State:
    """The state in a file, after its weights are loaded into the task. InputError if the settings differ."""
    old, new = content.get("settings", {}), task.settings
    check_settings(path, old, new, sorted(old.keys() | new.keys()))
    for name, module in task.modules().items():
        module.load_state_dict(content["modules"][name])
    for name, optimizer in task.optimizers.items():
        optimizer.load_state_dict(content["optimizers"][name])
    task.restore(content["extra"])
    state = State(**content["state"])
    state.sums = {name: value.to(options.device) for name, value in state.sums.items()}
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
    runlog.keep_rows(log, lambda row: made(_Row, row).step <= step)


def write_state(task: Task, state: State, options: TrainingOptions) -> None:
    """All a resumed run needs; data order and noise are functions of (seed, step), so the step is enough."""
    checkpoints.write_pt(
        options.folder / STATE,
        {
            "settings": task.settings,
            "state": vars(state),
            "extra": task.extra(),
            "modules": {name: module.state_dict() for name, module in task.modules().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in task.optimizers.items()},
        },
    )
