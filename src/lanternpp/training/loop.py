"""The loop that all trainings share, alone or in several processes: budget, schedule, average, checks, resume, export."""

from __future__ import annotations

import atexit
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lanternpp.api.rates import FILE as RATES
from lanternpp.api.results import versions
from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training.options import TrainingOptions
from lanternpp.training.state import Report, State, Task, begin_or_resume
from lanternpp.util.devices import device_name, half_width, pick_device
from lanternpp.util.files import locked
from lanternpp.util.jsonfile import write_json

TIMEOUT = timedelta(days=1)  # for processes that wait while the first one draws, validates and saves


class Team:
    """The processes that share every batch: those of `accelerate launch` or torchrun, else this process alone.

    Only several processes need Accelerate; InputError where it is not installed for them.
    """

    def __init__(self) -> None:
        self.size, self.rank = 1, 0
        self.accelerator: Any = None
        if (world_size := int(os.environ.get("WORLD_SIZE", "1"))) == 1:
            return
        try:
            from accelerate import Accelerator
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError:
            raise InputError(
                "training in several processes needs Accelerate: pip install 'lanternpp[train]'."
            ) from None
        handlers = [InitProcessGroupKwargs(timeout=TIMEOUT)]
        # Without `cpu`, Accelerate does not join processes on CPUs to a group.
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=handlers)
        # A thread of gloo that wants the interpreter while the interpreter exits would abort the process.
        atexit.register(self.accelerator.end_training)
        self.size, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        if self.size != world_size:
            raise InputError(
                f"WORLD_SIZE is {world_size}, but no such team was started: use accelerate launch or torchrun."
            )
        if self.accelerator.mixed_precision not in ("no", "bf16"):
            raise InputError(
                f"mixed precision {self.accelerator.mixed_precision} is not supported: use bf16 or no."
            )

    @property
    def leads(self) -> bool:
        """Whether this process validates, prints and writes."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch [B, ...]; raise InputError where the batch cannot be shared evenly."""
        if len(batch) % self.size:
            raise InputError(
                f"a batch of {len(batch)} pictures, which is --batch-size or all that there are, cannot be shared by "
                f"{self.size} processes: use a multiple of {self.size}."
            )
        return batch[self.rank :: self.size]

    def average_gradients(self, model: nn.Module) -> None:
        """Replace the gradients of a model by their mean over the team, in one exchange."""
        if self.accelerator is None:
            return
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        vector_to_parameters(self.accelerator.reduce(parameters_to_vector(gradients), "mean"), gradients)

    def reduce(self, values: Iterable[float], reduction: str) -> list[float]:
        """Return the "mean" or the "sum" over the team of each value, in one exchange."""
        numbers = list(values)
        if self.accelerator is None:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float32, device=self.accelerator.device)
        return self.accelerator.reduce(tensor, reduction).tolist()

    def leader_first(self) -> AbstractContextManager[None]:
        """Run the block in the first process first; the other processes then find its results on disk."""
        return nullcontext() if self.accelerator is None else self.accelerator.main_process_first()

    def device(self, name: str) -> torch.device:
        """Return a device by name, or the process's own GPU where the team computes on GPUs."""
        device = pick_device(name)
        if self.accelerator is not None and self.accelerator.device.type == device.type:
            device = self.accelerator.device
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # all steps have the same shapes
        return device

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Compute in bfloat16 where the launch asks for it or the device multiplies in it; else in float32."""
        if self.accelerator is not None and self.accelerator.mixed_precision != "no":
            return self.accelerator.autocast()
        dtype = compute_dtype(device)
        return torch.autocast(device.type, dtype) if dtype is torch.bfloat16 else nullcontext()


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products in trainings: bfloat16 where the device multiplies in it, else float32."""
    return torch.bfloat16 if half_width(device) is torch.bfloat16 else torch.float32


@cache
def team() -> Team:
    """Return the team that this process belongs to."""
    return Team()


def run(task: Task, options: TrainingOptions) -> bool:
    """Train `task` until its budget is used; return False if interrupted, with the state saved. Raise InputError as `begin_or_resume`."""
    with locked(options.folder) if team().leads else nullcontext():
        return _run(task, options)


def _run(task: Task, options: TrainingOptions) -> bool:
    state, leads = begin_or_resume(task, options), team().leads
    if options.compile:
        task.speed_up()
    report = Report(task.name, options.folder, silent=not leads)
    if task.first_weights and not state.step:
        report.say(task.first_weights)
    started, last_save = time.monotonic() - state.seconds, time.monotonic()
    progress = options.progress(state.step, state.seconds)
    check_seconds = last_check_seconds = 0.0  # of all checks of this process, and of the last check
    validation: dict[str, Any] | None = None  # figures of the current weights
    with report.bar(), stoppable() as stop:
        while progress < 1:
            update(task, state, progress)
            # The budget includes the check at the end, expected to take as long as the last check.
            elapsed = time.monotonic() - started + last_check_seconds
            num_stopped, elapsed = team().reduce((stop.is_set(), elapsed if leads else 0.0), "sum")
            state.seconds = elapsed - last_check_seconds
            progress = options.progress(state.step, elapsed)
            line = f"step {state.step}"
            if state.step % options.log_steps == 0 or progress >= 1:
                means = [value.item() / state.counted for value in state.sums.values()]
                figures = dict(zip(state.sums, team().reduce(means, "mean"), strict=True))
                # A broken model must not overwrite a good state.
                if not_finite := [name for name, value in figures.items() if not math.isfinite(value)]:
                    raise InputError(
                        f"{', '.join(not_finite)} is no longer finite at step {state.step}: --restart with a lower --lr."
                    )
                report.write({"step": state.step, "seconds": round(state.seconds, 2), **figures})
                line += f"  {as_text(figures)}"
                state.sums, state.counted = {}, 0
            report.advance(state.seconds, progress, line, last=progress >= 1)
            validation = None
            # With a budget in minutes, all checks except the last take at most a quarter of the time.
            affordable = progress >= 1 or options.minutes is None or 4 * check_seconds <= state.seconds
            check = affordable and int(progress * options.checks) > state.checked
            if check:
                state.checked = int(progress * options.checks)
                if leads:
                    check_started = time.monotonic()
                    validation = validate(task, state, report, options)
                    last_check_seconds = time.monotonic() - check_started
                    check_seconds += last_check_seconds
                    # `progress` was computed from `elapsed`; with fewer seconds a finished training would resume.
                    state.seconds = max(time.monotonic() - started, elapsed)
            interrupted = num_stopped > 0 or state.step == options.stop_after
            save = check or interrupted or time.monotonic() - last_save > 60 * options.save_minutes
            if save and leads:
                state.write(task, options.folder)
                last_save = time.monotonic()
            if interrupted and progress < 1:
                report.say(f"stopped at step {state.step}; the same command resumes it")
                return False
    if leads:
        finish(task, state, options, report, validation)
    return True


def update(task: Task, state: State, progress: float) -> None:
    """Take one step, update the moving average (buffers are copied), and add the losses of the step to `state`."""
    set_rate(task, progress, state.step)
    torch.manual_seed((task.settings["seed"] * 1_000_003 + state.step + (team().rank << 40)) % 2**63)
    for name, value in task.step(state.step, progress).items():
        state.sums[name] = state.sums[name] + value.detach() if name in state.sums else value.detach().clone()
    state.counted += 1
    decay = min(task.decay, (1 + state.step) / (10 + state.step))
    with torch.no_grad():
        torch._foreach_lerp_(list(task.average.parameters()), list(task.model.parameters()), 1 - decay)
        if buffers := list(task.average.buffers()):
            torch._foreach_copy_(buffers, list(task.model.buffers()))
    state.step += 1


def validate(task: Task, state: State, report: Report, options: TrainingOptions) -> dict[str, Any]:
    """Validate and sample the average, store it in `state` where it is the best so far, and return the figures."""
    figures = task.validate()
    report.write({"step": state.step, "validation": figures})
    report.say(f"step {state.step}  validation: {as_text(figures)}")
    if task.keep and (state.best is None or figures[task.keep] < state.best["figure"]):
        weights = {name: tensor.detach().cpu().clone() for name, tensor in task.average.state_dict().items()}
        state.best = {"figure": figures[task.keep], "step": state.step, "weights": weights}
    task.sample(options.folder / "samples" / f"{state.step:07d}.png")
    return figures


def finish(
    task: Task, state: State, options: TrainingOptions, report: Report, validation: dict[str, Any] | None
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
        "store": options.store,
    }
    (options.folder / RATES).unlink(missing_ok=True)  # counted with the previous weights
    write_json(options.folder / "provenance.json", facts)
    codebooks = [name for name in tensors if name.endswith("codebook")]
    checkpoints.save(options.folder, config, tensors, options.store, keep=codebooks)
    report.say(f"done after {state.step} steps: {as_text(figures)}; weights in {options.folder}")


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
    """Set the learning rates: a linear warm-up over steps, then a constant that falls to zero over the task's cooldown.

    Without a cooldown: a cosine over the budget, down to 2 % of the rate.
    """
    if task.cooldown is None:
        factor = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress))
    else:
        factor = min((1 - progress) / task.cooldown, 1.0)
    factor *= min((step + 1) / task.warmup, 1.0)
    for group in task.param_groups():
        group["lr"] = group["initial_lr"] * factor


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets; a second Ctrl-C interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

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
) -> dict[str, torch.optim.Optimizer]:
    """Build Muon for some of a model's matrices, with updates as large as AdamW's (arXiv 2502.16982), and AdamW for the other weights.

    decay: the weight decay under Muon; AdamW has none.
    """
    muon_ids = set(map(id, matrices))
    adamw_weights = [p for p in model.parameters() if id(p) not in muon_ids]
    return {
        "muon": torch.optim.Muon(matrices, muon_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        "adamw": torch.optim.AdamW(adamw_weights, lr, (0.9, 0.95), weight_decay=0.0, fused=True),
    }
