"""One-line messages and progress bars on stderr; tables on stdout, which a narrow terminal does not truncate."""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar

T = TypeVar("T")
MIN_PROSE_WIDTH = 24  # of a last column with prose
# Of torchao, which transformers imports where it is installed: notes on kernels for other machines.
NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
Progress = Callable[[int, int], None]
"""A function of (done, total)."""


def say(kind: str, message: object) -> None:
    """Print a message as one line on stderr."""
    print(f"lanternpp: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Return whether stderr is open, and a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each warning once and on one line, but no warning of torchao about kernels of other machines."""
    printed: set[str] = set()
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in printed:
            printed.add(str(message))
            say("warning", message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", "invalid escape sequence")  # in torchao's source
        yield


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """Show a bar with the elapsed and remaining time; yield its callback, or None if stderr is no terminal.

    A bar that begins while another bar is shown appears below it.
    """
    if not on_terminal():
        yield None
        return
    from rich.progress import BarColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    share = (BarColumn(), "{task.percentage:>3.0f} %")
    times = (TimeElapsedColumn(), "elapsed,", TimeRemainingColumn(), "left")
    with Progress("{task.description}", *share, *times, console=_stderr(), transient=True) as display:
        task = display.add_task(label, total=None)
        yield lambda done, total: display.update(task, completed=done, total=total)


def track(label: str, items: Sequence[T]) -> Iterator[T]:
    """Yield the items, and show a bar of how many the loop has done."""
    with progress_bar(label) as progress:
        for i, item in enumerate(items):
            if progress:
                progress(i, len(items))
            yield item


@cache
def _stderr() -> Any:
    """Return the console on stderr: bars are shown together if they have one console."""
    from rich.console import Console

    return Console(stderr=True)


def show_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    bold: Sequence[int] = (),
    left: Sequence[int] = (0,),
    prose: bool = False,
    spare: bool = False,
    caption: str | None = None,
) -> None:
    """Print rows under headings, or, on a terminal narrower than the table, every row as a list of its cells.

    bold: rows. left: left-aligned columns. prose: the last column may wrap. spare: the last column may be left out to
    fit the other columns.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    last = len(headings) - 1
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    if prose:
        widths[last] = min(widths[last], MIN_PROSE_WIDTH)
    free_width = console.width - sum(widths) - 2 * len(widths) - 1  # columns are separated by spaces
    if spare and free_width < 0 <= free_width + widths[last] + 2:
        headings, rows = headings[:-1], [row[:-1] for row in rows]
        prose, free_width = False, 0
    if title:
        print(filled(title, console.width))
    if free_width >= 0:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, heading in enumerate(headings):
            wraps = prose and i == last
            justify: Literal["left", "right"] = "left" if i in left or wraps else "right"
            table.add_column(heading, justify=justify, no_wrap=not wraps)
        for i, row in enumerate(rows):
            table.add_row(*map(Text, row), style="bold" if i in bold else None)
        console.print(table)
    else:
        for row in rows:
            print(row[0])
            for heading, cell in zip(headings[1:], row[1:], strict=True):
                if cell:
                    print(filled(f"  {heading}: {cell}", console.width))
        print()
    if caption:
        print(filled(caption, console.width))


def filled(line: str, width: int) -> str:
    """Return a text wrapped to a width, its further lines indented, no word broken."""
    return textwrap.fill(
        line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
