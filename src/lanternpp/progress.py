"""The columns of every progress bar."""

from __future__ import annotations

from typing import Any


def times() -> tuple[Any, ...]:
    """Columns of rich for a bar's times, each with its label: "0:01:10 elapsed, 0:00:20 left"."""
    from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left")
