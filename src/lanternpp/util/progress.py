"""Progress bars on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (done, total)."""
_shown: list[Any] = []  # the rich.Progress that is on the screen


def times() -> tuple[Any, ...]:
    """Columns of rich for a bar's times, each with its label: "0:01:10 elapsed, 0:00:20 left"."""
    from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A callback that moves a bar with the time elapsed and left, or None where stderr is no terminal.

    A bar that begins while another is shown stands below it.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    first = not _shown
    if first:
        _shown.append(Progress(*columns, *times(), console=Console(stderr=True), transient=True))
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
