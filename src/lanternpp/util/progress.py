"""Progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (done, total)."""
_shown: list[Any] = []  # the rich.Progress that is on the screen


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A callback that moves a bar with the time elapsed and left, or None where stderr is no terminal.

    A bar that begins while another is shown stands below it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    first = not _shown
    if first:
        share = (BarColumn(), "{task.percentage:>3.0f} %")
        times = (TimeElapsedColumn(), "elapsed,", TimeRemainingColumn(), "left")
        console = Console(stderr=True)
        _shown.append(Progress("{task.description}", *share, *times, console=console, transient=True))
        _shown[0].start()
    bars = _shown[0]
    task = bars.add_task(label, total=None)
    try:
        yield lambda done, total: bars.update(task, completed=done, total=total)
    finally:
        if first:
            _shown.remove(bars)
            bars.stop()
        else:
            bars.remove_task(task)
