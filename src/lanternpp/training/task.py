"""The two parts of a training: its options, and the task that says what is trained."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError
from lanternpp.nn.stores import Store


@dataclass(frozen=True)
class TrainingOptions:
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
    store: Store = "float32"
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

    def affords(self, checking: float, seconds: float) -> bool:
        """Whether there is time for a check: with a budget in minutes, all but the last take a quarter of it at most."""
        return self.minutes is None or 4 * checking <= seconds


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
    cooldown: float | None = (
        None  # share of the budget over which the rate falls to zero; None: a cosine over all of it
    )
    first_weights: str | None = None  # which of them were taken from another model and which are new
    keep: str | None = None  # the validation figure whose least value decides which average is exported

    @abstractmethod
    def step(self, step: int, progress: float) -> dict[str, Tensor]:
        """One update of `model`; returns scalars still on the device."""

    @abstractmethod
    def validate(self) -> dict[str, Any]:
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

    def restore(self, extra: dict[str, Any]) -> None:  # noqa: B027 (nothing to restore by default)
        """Take over what `extra` returned in the run that was stopped."""

    def speed_up(self) -> None:
        """Compile what is worth compiling."""
        self.model.compile()

    def final(self) -> dict[str, Any]:
        """More figures for the provenance, measured once at the end."""
        return {}


def param_groups(task: Task) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimizers."""
    for optimizer in task.optimizers.values():
        yield from optimizer.param_groups


def muon_and_adamw(
    model: nn.Module, matrices: list[nn.Parameter], muon_lr: float, lr: float, decay: float
) -> dict[str, torch.optim.Optimizer]:
    """Muon for some of a model's matrices, with updates as large as AdamW's (arXiv 2502.16982), and AdamW for the other weights.

    decay: the weight decay of the matrices; the others have none.
    """
    chosen = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in chosen]
    return {
        "muon": torch.optim.Muon(matrices, muon_lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        "adamw": torch.optim.AdamW(others, lr, (0.9, 0.95), weight_decay=0.0, fused=True),
    }


def check_rates(**rates: float) -> None:
    """InputError where a learning rate is not between 0 and 1."""
    for name, value in rates.items():
        if not 0 < value < 1:
            raise InputError(f"{name} {value} must be between 0 and 1; 1e-4 to 1e-2 are usual.")


def averaged(model: nn.Module) -> nn.Module:
    """A copy of a model to hold its moving average."""
    return copy.deepcopy(model).eval().requires_grad_(False)
