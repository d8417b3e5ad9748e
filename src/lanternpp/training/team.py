"""The processes that train together, the device and dtype of each, and the progress that the first one reports."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lanternpp.errors import InputError, counted
from lanternpp.nn.files import input_errors
from lanternpp.util.devices import half_width, pick_device
from lanternpp.util.jsonfile import append_row
from lanternpp.util.terminal import Progress, progress_bar

LOG = "log.jsonl"
REPORT_SECONDS = 10  # between two lines of a report
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
TIMEOUT = timedelta(days=1)  # for processes that wait while the first one draws, validates and saves


class Team:
    """The processes that share every batch: those of `accelerate launch` or torchrun, else this process alone.

    Only several processes need Accelerate. Raise InputError where it is not installed for them, or where they do not find each other.
    """

    def __init__(self) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), 0
        self.accelerator: Any = None
        if self.size == 1:
            return
        try:
            from accelerate import Accelerator
            from accelerate.utils import InitProcessGroupKwargs
        except ImportError:
            raise InputError(
                "training in several processes needs Accelerate: pip install 'lanternpp[train]'."
            ) from None
        handlers = [InitProcessGroupKwargs(timeout=TIMEOUT)]
        sentence = f"WORLD_SIZE is {self.size}, but no such team of processes was started"
        with input_errors(sentence, "use accelerate launch or torchrun, or unset WORLD_SIZE"):
            # Without `cpu`, Accelerate does not join processes on CPUs to a group.
            self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=handlers)
            if self.accelerator.num_processes != self.size:
                raise ValueError(f"there are {self.accelerator.num_processes}")
        # A thread of gloo that wants the interpreter while the interpreter exits would abort the process.
        atexit.register(self.accelerator.end_training)
        self.rank = self.accelerator.process_index
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
                f"a batch of {counted(len(batch), 'picture')}, which is --batch-size or all that there are, cannot be shared by "
                f"{self.size} processes: use a multiple of {self.size}."
            )
        return batch[self.rank :: self.size]

    def average_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace the gradients of the optimizers' weights by their mean over the team, in one exchange."""
        if self.accelerator is not None:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            mean = self.accelerator.reduce(torch.cat([x.flatten() for x in gradients]), "mean")
            for gradient, part in zip(gradients, mean.split([x.numel() for x in gradients]), strict=True):
                gradient.copy_(part.view(gradient.shape))

    def sums(self, values: Iterable[float]) -> list[float]:
        """Return the sum over the team of each value, in one exchange."""
        numbers = list(values)
        if self.accelerator is None:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float32, device=self.accelerator.device)
        return self.accelerator.reduce(tensor, "sum").tolist()

    def device(self, name: str) -> torch.device:
        """Return a device by name, or the process's own GPU where the team computes on GPUs."""
        device = pick_device(name)
        if self.accelerator is not None and self.accelerator.device.type == device.type:
            device = self.accelerator.device
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # all steps have the same shapes
        else:
            keep_freed_memory()
        return device


def keep_freed_memory() -> None:
    """Let glibc keep freed memory of every size: the pages of large tensors, new in every step, took a third of a step's time."""
    with suppress(AttributeError, TypeError):  # of other C libraries
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_MAX, 0)


@cache
def team() -> Team:
    """Return the team that this process belongs to."""
    return Team()


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products in trainings: bfloat16 where the device multiplies in it, else float32."""
    return torch.bfloat16 if half_width(device) is torch.bfloat16 else torch.float32


class Float32Products(torch.overrides.TorchFunctionMode):
    """Leave in float32, within the block, what Muon would multiply in bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].float() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in bfloat16 where `accelerate launch` asks for it or the device multiplies in it; else in float32."""
    accelerator, dtype = team().accelerator, compute_dtype(device)
    if accelerator is not None and accelerator.mixed_precision != "no":
        return accelerator.autocast()
    return torch.autocast(device.type, dtype) if dtype is torch.bfloat16 else nullcontext()


class Report:
    """Progress on stderr, a line every ten seconds and on a terminal a bar, and the rows of `log.jsonl`, of the first process."""

    def __init__(self, name: str, folder: Path):
        self.name, self.log = name, folder / LOG
        self._move: Progress | None = None
        self._last_line = time.monotonic()
        # The progress, and the seconds of the clock, where this process began.
        self._start: tuple[float, float] | None = None

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar while the block runs."""
        with progress_bar(self.name) if team().leads else nullcontext() as self._move:
            yield

    def advance(self, progress: float, line: str, last: bool = False) -> None:
        """Move the bar to `progress`, 0..1, and print the line if it is due or the last one."""
        now = time.monotonic()
        first_progress, started = self._start = self._start or (progress, now)
        if self._move is not None:
            self._move(round(1000 * progress), 1000)
        if last or now - self._last_line > REPORT_SECONDS:
            left = ""
            if first_progress < progress < 1:
                minutes = (now - started) / (progress - first_progress) * (1 - progress) / 60
                left = f"  {minutes:.1f} min left"
            self.say(f"{100 * progress:5.1f} %{left}  {line}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._last_line = time.monotonic()
        if team().leads:
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row to the log."""
        if team().leads:
            append_row(self.log, row)
