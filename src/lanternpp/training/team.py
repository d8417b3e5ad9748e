"""Several processes that share every batch, by way of Hugging Face Accelerate; alone, a process is a team of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lanternpp.errors import InputError

TIMEOUT = timedelta(days=1)  # the others wait while the first one draws, validates and saves


class Team:
    """One process: nothing is shared, and everything is written."""

    size, rank = 1, 0

    @property
    def leads(self) -> bool:
        """Whether this process validates, prints and writes."""
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This process's part of a batch [B, ...]. InputError where it cannot be parted evenly."""
        if len(batch) % self.size:
            raise InputError(
                f"a batch of {len(batch)} cannot be shared by {self.size} processes: use a multiple of {self.size}."
            )
        return batch[self.rank :: self.size]

    def average(self, model: nn.Module) -> None:
        """The gradients of a model become their mean over the team."""
        return

    def mean(self, figures: dict[str, float]) -> dict[str, float]:
        """The mean of some figures over the team."""
        return figures

    def agree(self, stop: bool, seconds: float) -> tuple[bool, float]:
        """Whether any process was told to stop, and the seconds of the first process."""
        return stop, seconds

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The first process runs the block first; the others then find its results on disk."""
        yield

    def device(self, named: torch.device) -> torch.device:
        """Where this process computes."""
        return named

    def autocast(self) -> AbstractContextManager[object] | None:
        """The precision asked for at launch; None: the training's own choice."""
        return None


class Accelerated(Team):
    """The processes that `accelerate launch` or torchrun started."""

    def __init__(self) -> None:
        try:
            from accelerate import Accelerator
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError:
            raise InputError(
                "training in several processes needs Accelerate: pip install 'lanternpp[train]'."
            ) from None
        self.accelerator: Any = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
        self.size, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        if self.accelerator.mixed_precision not in ("no", "bf16"):
            raise InputError(
                f"mixed precision {self.accelerator.mixed_precision} is not supported: use bf16 or no."
            )

    def average(self, model: nn.Module) -> None:
        """All gradients in one exchange."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = self.accelerator.reduce(torch.cat([x.flatten() for x in gradients]), "mean")
        for x, part in zip(gradients, flat.split([x.numel() for x in gradients]), strict=True):
            x.copy_(part.view_as(x))

    def mean(self, figures: dict[str, float]) -> dict[str, float]:
        """One exchange for all."""
        values = torch.tensor(list(figures.values()), dtype=torch.float32, device=self.accelerator.device)
        return dict(zip(figures, self.accelerator.reduce(values, "mean").tolist(), strict=True))

    def agree(self, stop: bool, seconds: float) -> tuple[bool, float]:
        """One exchange for both."""
        values = torch.tensor([float(stop), seconds if self.leads else 0.0], device=self.accelerator.device)
        stopped, shared = self.accelerator.reduce(values, "sum").tolist()
        return stopped > 0, shared

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """By Accelerate's `main_process_first`."""
        with self.accelerator.main_process_first():
            yield

    def device(self, named: torch.device) -> torch.device:
        """The process's own GPU, where the team computes on GPUs."""
        found: torch.device = self.accelerator.device
        return found if named.type == found.type else named

    def autocast(self) -> AbstractContextManager[object] | None:
        """bfloat16 where the launch asked for it."""
        return self.accelerator.autocast() if self.accelerator.mixed_precision != "no" else None


@cache
def team() -> Team:
    """The team that this process belongs to, found out once. InputError where Accelerate is missing."""
    return Accelerated() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Team()
