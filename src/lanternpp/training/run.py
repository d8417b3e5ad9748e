"""The skeleton all trainings share: budget, schedule, average, checks, state, resume, export."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training.report import Report, provenance
from lanternpp.training.state import STATE, State, begin_or_resume, write_state
from lanternpp.training.task import Task, TrainingOptions, averaged, param_groups
from lanternpp.training.team import team

__all__ = ["STATE", "Task", "TrainingOptions", "averaged", "run"]


def run(task: Task, options: TrainingOptions, report: Report | None = None) -> bool:
    """Train `task` to the end of its budget. False if interrupted; the state is saved and resumes."""
    options.folder.mkdir(parents=True, exist_ok=True)
    state, processes = begin_or_resume(task, options), team()
    if options.compile:
        task.speed_up()
    report = report or Report(task.name, options.folder, silent=not processes.leads)
    if task.first_weights and not state.step:
        report.say(task.first_weights)
    started = time.monotonic() - state.seconds
    saved = time.monotonic()
    sums, counted = state.sums, state.counted
    progress = options.progress(state.step, state.seconds)
    checking = last = 0.0  # seconds of all checks of this process, and of the last one
    validated: dict[str, Any] | None = None  # the figures of the last step's weights
    with report.bar(progress), stoppable() as stop:
        while progress < 1:
            set_rate(task, progress, state.step)
            torch.manual_seed(
                (task.settings["seed"] * 1_000_003 + state.step + (processes.rank << 40)) % 2**63
            )
            for name, value in task.step(state.step, progress).items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()
            counted += 1
            update_average(task.average, task.model, min(task.decay, (1 + state.step) / (10 + state.step)))
            state.step += 1
            elapsed = time.monotonic() - started + last  # with the check at the end
            stopped, elapsed = processes.agree(stop.is_set(), elapsed)
            state.seconds, progress = elapsed - last, options.progress(state.step, elapsed)
            if state.step % options.log_steps == 0 or progress >= 1:
                figures = processes.mean({name: value.item() / counted for name, value in sums.items()})
                check_finite(figures, state.step)
                report.losses(state.step, state.seconds, progress, figures)
                sums, counted = {}, 0
            elif report.due():
                report.advance(state.seconds, progress, f"step {state.step}")
            validated = None
            check = int(progress * options.checks) > state.checked and (
                progress >= 1 or options.affords(checking, state.seconds)
            )
            if check:
                state.checked = int(progress * options.checks)
                if processes.leads:
                    began = time.monotonic()
                    validated = validate(task, state, report, options)
                    last = time.monotonic() - began
                    checking += last
            interrupted = stopped or state.step == options.stop_after
            due = check or interrupted or time.monotonic() - saved > 60 * options.save_minutes
            if due and processes.leads:
                state.sums, state.counted = sums, counted
                write_state(task, state, options)
                saved = time.monotonic()
            if interrupted and progress < 1:
                report.say(f"stopped at step {state.step}; the same command resumes it")
                return False
    if processes.leads:
        finish(task, state, options, report, validated)
    return True


def validate(task: Task, state: State, report: Report, options: TrainingOptions) -> dict[str, Any]:
    """Validate and sample the average; remember it where it is the best so far. Returns the figures."""
    figures = task.validate()
    report.figures(state.step, figures)
    if task.keep and (state.best is None or figures[task.keep] < state.best["figure"]):
        weights = {name: tensor.detach().cpu().clone() for name, tensor in task.average.state_dict().items()}
        state.best = {"figure": figures[task.keep], "step": state.step, "weights": weights}
    folder = options.folder / "samples"
    folder.mkdir(exist_ok=True)
    task.sample(folder / f"{state.step:07d}.png")
    return figures


def finish(
    task: Task,
    state: State,
    options: TrainingOptions,
    report: Report,
    validated: dict[str, Any] | None = None,
) -> None:
    """Export the average (the best one, where the task keeps it) with its provenance.

    validated: the figures of the last step's weights, where they are known.
    """
    if state.best is not None:
        task.average.load_state_dict(state.best["weights"])
        validated = validated if state.best["step"] == state.step else None
    figures = {**(validated or task.validate()), **task.final()}
    exported = state.best["step"] if state.best else state.step
    config, tensors = task.export()
    provenance(
        options.folder,
        {
            "trains": task.name,
            "data": task.data,
            "settings": task.settings,
            "first_weights": task.first_weights,
            "steps": state.step,
            "exported_step": exported,
            "minutes": round(state.seconds / 60, 2),
            "validation": figures,
            "parameters": sum(p.numel() for p in task.average.parameters()),
            "store": options.store,
        },
        options.device,
    )
    exact = [name for name in tensors if name.endswith("codebook")]
    checkpoints.save(options.folder, config, tensors, options.store, keep=exact)
    report.say(f"done after {state.step} steps: {report.text(figures)}; weights in {options.folder}")


def set_rate(task: Task, progress: float, step: int) -> None:
    """Linear warm-up over steps; then a constant rate that falls to zero over the task's cooldown.

    Without a cooldown: a cosine over the budget, down to 2 % of the rate.
    """
    if task.cooldown is None:
        factor = 0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress))
    else:
        factor = min((1 - progress) / task.cooldown, 1.0)
    factor *= min((step + 1) / task.warmup, 1.0)
    for group in param_groups(task):
        group["lr"] = group["initial_lr"] * factor


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights a step towards the model's; buffers are copied."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
    averages, values = list(average.buffers()), list(model.buffers())
    if averages:
        torch._foreach_copy_(averages, values)


def check_finite(figures: dict[str, float], step: int) -> None:
    """Stop before a broken model overwrites a good state."""
    broken = [name for name, value in figures.items() if not math.isfinite(value)]
    if broken:
        raise InputError(
            f"{', '.join(broken)} is no longer finite at step {step}: --restart with a lower --lr."
        )


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C (or SIGTERM) sets; a second Ctrl-C interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def request(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
