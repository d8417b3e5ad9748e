"""The loop that all trainings share: state from which a killed run resumes with the same result, budget, schedule, checks, export."""

from __future__ import annotations

import copy
import math
import shlex
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lanternpp.api.rates import FILE as RATES
from lanternpp.api.results import versions
from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.nn.files import input_errors, read_pt
from lanternpp.training.options import Stored, TrainingOptions
from lanternpp.training.team import LOG, Float32Products, Report, compute_dtype, team
from lanternpp.util.devices import device_name
from lanternpp.util.files import locked, sweep
from lanternpp.util.jsonfile import differences, keep_rows, write_json

STATE = "state.pt"
LOG_STEPS = 25  # between two rows of losses in the log
NO_STATE, RESTART = "is no state of this training", "pass --restart to start over"
MEANINGS = {
    "data": ", which stands for the training data",
    "target": ", which stands for the target's weights",
    "redrawn_data": ", which stands for the pictures as its tokenizer draws them",
}
M = TypeVar("M", bound=nn.Module)


class Task(ABC):
    """The base class of trainings. `settings` are the values that a resumed run must share."""

    name: str
    hparams: Any  # with seed, decay, warmup and, for a rate that is constant before its cooldown, cooldown
    device: torch.device
    settings: dict[str, Any]
    data: dict[str, Any]  # for the provenance
    model: nn.Module  # trained
    average: nn.Module  # its moving average: validated and exported
    optimizers: dict[str, Optimizer]
    modules: tuple[str, ...] = ("model", "average")  # attributes whose weights a resumed run needs
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

    def parts(self) -> dict[str, Any]:
        """Return the modules and optimizers whose state a resumed run needs, by name."""
        optimizers = {f"optimizer {name}": optimizer for name, optimizer in self.optimizers.items()}
        return {name: getattr(self, name) for name in self.modules} | optimizers

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
    best: dict[str, Any] | None = None  # {"figure", "step", "weights"} where the task keeps its best
    sums: dict[str, Tensor] = field(default_factory=dict)  # of the losses since the log was last written
    counted: int = 0  # steps in `sums`

    def write(self, task: Task, folder: Path) -> None:
        """Write the state, the settings, and the state of the task's modules and optimizers."""
        parts = {name: part.state_dict() for name, part in task.parts().items()}
        content = {"settings": task.settings, "state": vars(self), "parts": parts}
        checkpoints.write_pt(folder / STATE, content)


def begin_or_resume(task: Task, folder: Path, options: TrainingOptions) -> State:
    """Return a new state, or the saved state of the folder; raise InputError as `saved_state`."""
    path = folder / STATE
    sweep(folder)
    content = saved_state(folder, options.restart, task.settings)
    if content is None:
        for group in task.param_groups():
            group["initial_lr"] = group["lr"]
        # A run that is started over, or that was killed before its first state, has left these files.
        path.unlink(missing_ok=True)
        (folder / LOG).unlink(missing_ok=True)
        return State()
    with input_errors(f"{path} {NO_STATE}", RESTART):
        for name, part in task.parts().items():
            part.load_state_dict(content["parts"][name])
        state = State(**content["state"])
        state.sums = {name: value.to(task.device) for name, value in state.sums.items()}
    # A killed run may have written rows after its last saved step.
    keep_rows(folder / LOG, lambda row: row.get("step", 0) <= state.step)
    return state


def saved_state(
    folder: Path, restart: bool, settings: Mapping[str, Any], mmap: bool = False
) -> dict[str, Any] | None:
    """Return the content of a folder's state; None where there is none, or the run starts over.

    mmap: leave the tensors, which are memory-mapped, unread. Raise InputError where the file is damaged, or has other settings.
    """
    path, content = folder / STATE, dict[str, Any]()
    if restart or not path.exists():
        return None
    with suppress(InputError):
        content = read_pt(path, mmap)
    if not isinstance(saved := content.get("settings"), dict):
        raise InputError(f"{path} {NO_STATE}: {RESTART}.")
    saved = {name: saved.get(name) for name in settings}
    if changes := sorted(differences(saved, dict(settings))):
        # The user cannot repeat the pictures that a tokenizer redraws, as they are no option.
        repeat = "" if changes[0].startswith("redrawn_data ") else "repeat its settings to resume, or "
        changes = [change + MEANINGS.get(change.partition(" ")[0], "") for change in changes]
        raise InputError(f"{path} was trained with other settings ({'; '.join(changes)}): {repeat}{RESTART}.")
    return content


def run(task: Task, folder: Path, options: TrainingOptions) -> bool:
    """Train `task` in a folder until its budget is used; return False if interrupted, with the state saved.

    Raise InputError as `begin_or_resume`.
    """
    with locked(folder) if team().leads else nullcontext():
        return _run(task, folder, options)


def _run(task: Task, folder: Path, options: TrainingOptions) -> bool:
    state, leads = begin_or_resume(task, folder, options), team().leads
    if options.compile:
        task.speed_up()
    report = Report(task.name, folder)
    if task.first_weights and not state.step:
        report.say(task.first_weights)
    started, last_save = time.monotonic() - state.seconds, time.monotonic()
    progress = options.progress(state.step, state.seconds)
    checked = int(progress * options.checks)  # the last check that was due
    check_seconds = last_check_seconds = 0.0  # of all checks of this process, and of the last check
    validation: dict[str, Any] | None = None  # figures of the current weights
    with report.bar(), stoppable() as stop:
        while progress < 1:
            update(task, state, progress)
            # The budget includes the check at the end, expected to take as long as the last check.
            elapsed = time.monotonic() - started + last_check_seconds
            num_stopped, elapsed = team().sums((stop.is_set(), elapsed if leads else 0.0))
            state.seconds = elapsed - last_check_seconds
            progress = options.progress(state.step, elapsed)
            line = f"step {state.step}"
            if state.step % LOG_STEPS == 0 or progress >= 1:
                means = [value.item() / state.counted / team().size for value in state.sums.values()]
                figures = dict(zip(state.sums, team().sums(means), strict=True))
                # A broken model must not overwrite a good state.
                if not_finite := [name for name, value in figures.items() if not math.isfinite(value)]:
                    raise InputError(
                        f"{', '.join(not_finite)} is no longer finite at step {state.step}: --restart with a lower --lr."
                    )
                report.write({"step": state.step, "seconds": round(state.seconds, 2), **figures})
                line += f"  {as_text(figures)}"
                state.sums, state.counted = {}, 0
            report.advance(progress, line, last=progress >= 1)
            validation = None
            # With a budget in minutes, all checks except the last take at most a quarter of the time.
            affordable = progress >= 1 or options.minutes is None or 4 * check_seconds <= state.seconds
            check = affordable and int(progress * options.checks) > checked
            if check:
                checked = int(progress * options.checks)
                if leads:
                    check_started = time.monotonic()
                    validation = validate(task, state, report, folder)
                    last_check_seconds = time.monotonic() - check_started
                    check_seconds += last_check_seconds
                    # `progress` was computed from `elapsed`; with fewer seconds a finished training would resume.
                    state.seconds = max(time.monotonic() - started, elapsed)
            save = check or num_stopped or time.monotonic() - last_save > 60 * options.save_minutes
            if save and leads:
                state.write(task, folder)
                last_save = time.monotonic()
            if num_stopped and progress < 1:
                report.say(f"stopped at step {state.step}; the same command resumes it")
                return False
    if leads:
        finish(task, state, folder, options.store, report, validation)
    return True


def update(task: Task, state: State, progress: float) -> None:
    """Take one step, update the moving average (buffers are copied), and add the losses of the step to `state`."""
    set_rate(task, progress, state.step)
    torch.manual_seed((task.hparams.seed * 1_000_003 + state.step + (team().rank << 40)) % 2**63)
    for name, value in task.step(state.step, progress).items():
        state.sums[name] = state.sums[name] + value.detach() if name in state.sums else value.detach().clone()
    state.counted += 1
    decay = min(task.hparams.decay, (1 + state.step) / (10 + state.step))
    with torch.no_grad():
        torch._foreach_lerp_(list(task.average.parameters()), list(task.model.parameters()), 1 - decay)
        if buffers := list(task.average.buffers()):
            torch._foreach_copy_(buffers, list(task.model.buffers()))
    state.step += 1


def validate(task: Task, state: State, report: Report, folder: Path) -> dict[str, Any]:
    """Validate and sample the average, store it in `state` where it is the best so far, and return the figures."""
    figures = task.validate()
    report.write({"step": state.step, "validation": figures})
    report.say(f"step {state.step}  validation: {as_text(figures)}")
    if task.keep and (state.best is None or figures[task.keep] < state.best["figure"]):
        weights = {name: tensor.detach().cpu().clone() for name, tensor in task.average.state_dict().items()}
        state.best = {"figure": figures[task.keep], "step": state.step, "weights": weights}
    task.sample(folder / "samples" / f"{state.step:07d}.png")
    return figures


def finish(
    task: Task, state: State, folder: Path, store: Stored, report: Report, validation: dict[str, Any] | None
) -> None:
    """Export the average (the best one, where the task keeps it) with its provenance.

    validation: the figures of the last step's weights; None: not validated yet.
    """
    exported_step = state.step
    if state.best is not None:
        exported_step = state.best["step"]
        task.average.load_state_dict(state.best["weights"])
    if validation is None or exported_step != state.step:
        validation = task.validate()
    figures = {**validation, **task.final()}
    config, tensors = task.export()
    facts = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "versions": versions(),
        "hardware": f"{device_name(task.device)}, {torch.get_num_threads()} threads",
        "trains": task.name,
        "data": task.data,
        "settings": task.settings,
        "first_weights": task.first_weights,
        "steps": state.step,
        "exported_step": exported_step,
        "minutes": round(state.seconds / 60, 2),
        "validation": figures,
        "parameters": sum(p.numel() for p in task.average.parameters()),
        "store": store,
    }
    (folder / RATES).unlink(missing_ok=True)  # counted with the previous weights
    codebooks = [name for name in tensors if name.endswith("codebook")]
    checkpoints.save(folder, config, tensors, store, keep=codebooks)
    write_json(folder / "provenance.json", facts)  # after the weights that it describes
    report.say(f"done after {state.step} steps: {as_text(figures)}; weights in {folder}")


def as_text(figures: Mapping[str, Any]) -> str:
    """Return `name value` of each figure that is a number, as one line."""
    numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def revision() -> str | None:
    """Return the commit of the source, with + where files differ from it; None outside a checkout."""
    folder = str(Path(__file__).parent)
    command = ("git", "-C", folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def set_rate(task: Task, progress: float, step: int) -> None:
    """Set the learning rates: a linear warm-up over steps, then a constant that falls to zero over the cooldown, a share of the budget.

    Without a cooldown: a cosine over the budget, down to 2 % of the rate.
    """
    cooldown = getattr(task.hparams, "cooldown", None)
    if cooldown is None:
        factor = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress))
    else:
        factor = min((1 - progress) / cooldown, 1.0)
    factor *= min((step + 1) / task.hparams.warmup, 1.0)
    for group in task.param_groups():
        group["lr"] = group["initial_lr"] * factor


def descend(
    optimizers: Collection[Optimizer], loss: Tensor, clipped: Iterable[Tensor], max_norm: float = 1.0
) -> None:
    """Take one step of the optimizers by a loss, averaged over the team.

    clipped: parameters whose gradient is clipped to `max_norm`.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    team().average_gradients(optimizers)
    nn.utils.clip_grad_norm_(clipped, max_norm)
    # CPUs without products of bfloat16 take thirty times as long for them; on ARM PyTorch also warns, and stops using oneDNN.
    with nullcontext() if compute_dtype(loss.device) == torch.bfloat16 else Float32Products():
        for optimizer in optimizers:
            optimizer.step()


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets; a second Ctrl-C interrupts at once."""
    event = threading.Event()

    def request(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    old_handlers = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def muon_and_adamw(
    model: nn.Module, matrices: list[nn.Parameter], muon_lr: float, lr: float, decay: float
) -> dict[str, Optimizer]:
    """Build Muon for some of a model's matrices, with updates as large as AdamW's (arXiv 2502.16982), and AdamW for the other weights.

    decay: the weight decay under Muon; AdamW has none.
    """
    muon_ids = set(map(id, matrices))
    adamw_weights = [p for p in model.parameters() if id(p) not in muon_ids]
    return {
        "muon": torch.optim.Muon(matrices, muon_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        "adamw": torch.optim.AdamW(adamw_weights, lr, (0.9, 0.95), weight_decay=0.0, fused=True),
    }
