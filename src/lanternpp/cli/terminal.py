"""Messages on stderr: errors and warnings of one line each, and progress bars."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from lanternpp.progress import times

NOISY = ("torchao", "torch.utils._pytree")  # transformers imports torchao where it is installed
Progress = Callable[[int, int], None]
"""Called with (done, total)."""


def say(kind: str, message: object) -> None:
    """Print a message as one line on stderr."""
    print(f"lanternpp: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def tell_effect(effect: object | None) -> None:
    """Print one line on what weights in 8 bits do to the logits; nothing where they are not in 8 bits."""
    if effect is not None:
        say("int8", effect)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line each, equal ones once, and none of torchao's about kernels of other machines."""
    seen: set[str] = set()
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            say("warning", message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", "invalid escape sequence")  # torchao's own
        yield


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A callback that moves a bar with the time elapsed and left, or None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, *times(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
