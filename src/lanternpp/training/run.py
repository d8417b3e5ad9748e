"""The skeleton all three trainings share: budget, schedule, average, checks, state, resume, export."""

from __future__ import annotations

import copy
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn import checkpoints
from lanternpp.training.report import Report, provenance

STATE = "state.pt"


@dataclass(frozen=True)
class Plan:
    """How long, where and how to run: what may change between a run and its resumption."""

    folder: Path
    steps: int | None = None
    minutes: float | None = None
    restart: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = False
    checks: int = 20  # validations, samples and saved states, evenly over the run
    save_minutes: float = 5.0  # a state is also saved this often
    log_steps: int = 25
    store: checkpoints.Store = "float32"
    stop_after: int | None = None  # pause at this step as if interrupted (a lease that ends, a test)

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise InputError("a training needs a budget: give --steps N, --minutes M or both.")
        for name, value in (("--steps", self.steps), ("--minutes", self.minutes)):
            if value is not None and value <= 0:
                raise InputError(f"{name} {value} must be above 0.")

    def progress(self, step: int, seconds: float) -> float:
        """0..1: how much of the budget is spent."""
        parts = [step / self.steps] if self.steps else []
        parts += [seconds / 60 / self.minutes] if self.minutes else []
        return min(max(parts), 1.0)


class Task(ABC):
    """What is trained. `settings` are the values that a resumed run must share."""

    name: str
    settings: dict[str, Any]
    data: dict[str, Any]  # for the provenance
    model: nn.Module  # trained
    average: nn.Module  # its moving average: validated and exported
    optimizers: dict[str, torch.optim.Optimizer]
    decay: float = 0.999
    warmup: int = 200
    keep: str | None = None  # the validation figure whose least value decides which average is exported

    @abstractmethod
    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update of `model`; returns scalars still on the device."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures of `average` on held-out data."""

    @abstractmethod
    def sample(self, path: Path) -> None:
        """A PNG that shows what `average` does."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Config and tensors of `average`, as a model folder holds them."""

    def modules(self) -> dict[str, nn.Module]:
        """Everything a resumed run needs the weights of."""
        return {"model": self.model, "average": self.average}

    def extra(self) -> dict[str, Any]:
        """Plain values a resumed run needs."""
        return {}

    def restore(self, extra: dict[str, Any]) -> None:  # noqa: B027 (nothing to undo by default)
        """Undo `extra`."""

    def speed_up(self) -> None:
        """Compile what is worth compiling."""
        self.model.compile()

    def final(self) -> dict[str, Any]:
        """More figures for the provenance, measured once at the end."""
        return {}


def run(task: Task, plan: Plan, report: Report | None = None) -> bool:
    """Train `task` to the end of its budget. False if interrupted; the state is saved and resumes."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    state = begin(task, plan)
    if plan.compile:
        task.speed_up()
    report = report or Report(task.name, plan.folder)
    started = time.monotonic() - state.seconds
    saved, counted = time.monotonic(), 0
    sums: dict[str, Tensor] = {}
    with report.bar(plan.progress(state.step, state.seconds)), stoppable() as stop:
        while (progress := plan.progress(state.step, state.seconds)) < 1:
            rate(task, progress, state.step)
            torch.manual_seed((task.settings["seed"] * 1_000_003 + state.step) % 2**63)
            for name, value in task.step(state.step, progress).items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach().clone()
            counted += 1
            follow(task.average, task.model, min(task.decay, (1 + state.step) / (10 + state.step)))
            state.step += 1
            state.seconds = time.monotonic() - started
            progress = plan.progress(state.step, state.seconds)
            if state.step % plan.log_steps == 0 or report.due() or progress >= 1:
                figures = {name: value.item() / counted for name, value in sums.items()}
                check_finite(figures, state.step)
                report.losses(state.step, state.seconds, progress, figures)
                sums, counted = {}, 0
            check = int(progress * plan.checks) > state.checked
            if check:
                state.checked = int(progress * plan.checks)
                judge(task, state, report, plan)
            interrupted = stop.is_set() or state.step == plan.stop_after
            if check or interrupted or time.monotonic() - saved > 60 * plan.save_minutes:
                write_state(task, state, plan)
                saved = time.monotonic()
            if interrupted and progress < 1:
                report.say(f"stopped at step {state.step}; the same command resumes it")
                return False
    finish(task, state, plan, report)
    return True


@dataclass
class State:
    """Where a run stands."""

    step: int = 0
    seconds: float = 0.0
    checked: int = 0
    best: dict[str, Any] | None = None  # {"figure", "step", "weights"} where the task keeps its best


def begin(task: Task, plan: Plan) -> State:
    """A fresh state, or the one saved in the folder; refused where that was trained with other settings."""
    path = plan.folder / STATE
    if plan.restart or not path.exists():
        for group in groups(task):
            group["initial_lr"] = group["lr"]
        if plan.restart:
            (plan.folder / "log.jsonl").unlink(missing_ok=True)
        return State()
    content = checkpoints.read_pt(path)
    old, new = content.get("settings", {}), task.settings
    changed = [
        f"{name} {old.get(name)!r} -> {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise InputError(
            f"{path} was trained with other settings ({'; '.join(changed)}): "
            "repeat its settings to resume, or pass --restart to start over."
        )
    for name, module in task.modules().items():
        checkpoints.fill(module, content["modules"][name], path)
    for name, optimizer in task.optimizers.items():
        optimizer.load_state_dict(content["optimizers"][name])
    task.restore(content["extra"])
    return State(**content["state"])


def write_state(task: Task, state: State, plan: Plan) -> None:
    """All a resumed run needs; data order and noise are functions of (seed, step), so the step is enough."""
    checkpoints.write_pt(
        plan.folder / STATE,
        {
            "settings": task.settings,
            "state": vars(state),
            "extra": task.extra(),
            "modules": {name: module.state_dict() for name, module in task.modules().items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in task.optimizers.items()},
        },
    )


def judge(task: Task, state: State, report: Report, plan: Plan) -> None:
    """Validate and sample the average; remember it where it is the best so far."""
    figures = task.validate()
    report.figures(state.step, figures)
    if task.keep and (state.best is None or figures[task.keep] < state.best["figure"]):
        weights = {name: tensor.detach().cpu().clone() for name, tensor in task.average.state_dict().items()}
        state.best = {"figure": figures[task.keep], "step": state.step, "weights": weights}
    folder = plan.folder / "samples"
    folder.mkdir(exist_ok=True)
    task.sample(folder / f"{state.step:07d}.png")


def finish(task: Task, state: State, plan: Plan, report: Report) -> None:
    """Export the average (the best one, where the task keeps it) with its provenance."""
    if state.best is not None:
        task.average.load_state_dict(state.best["weights"])
    figures = {**task.validate(), **task.final()}
    exported = state.best["step"] if state.best else state.step
    config, tensors = task.export()
    provenance(
        plan.folder,
        {
            "trains": task.name,
            "data": task.data,
            "settings": task.settings,
            "steps": state.step,
            "exported_step": exported,
            "minutes": round(state.seconds / 60, 2),
            "validation": figures,
            "parameters": sum(p.numel() for p in task.average.parameters()),
            "store": plan.store,
        },
        plan.device,
    )
    exact = [name for name in tensors if name.endswith("codebook")]
    checkpoints.save(plan.folder, config, tensors, plan.store, keep=exact)
    report.say(f"done after {state.step} steps: {report.text(figures)}; weights in {plan.folder}")


def groups(task: Task) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimizers."""
    for optimizer in task.optimizers.values():
        yield from optimizer.param_groups


def rate(task: Task, progress: float, step: int) -> None:
    """Linear warm-up over steps, then a cosine over the budget down to 2 % of the rate."""
    factor = min((step + 1) / task.warmup, 1.0) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * progress)))
    for group in groups(task):
        group["lr"] = group["initial_lr"] * factor


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights a step towards the model's; buffers are copied."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
    mine, other = list(average.buffers()), list(model.buffers())
    if mine:
        torch._foreach_copy_(mine, other)


def averaged(model: nn.Module) -> nn.Module:
    """A copy of a model to hold its moving average."""
    return copy.deepcopy(model).eval().requires_grad_(False)


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
