"""Messages on stderr, of one line each; progress bars; tables on stdout, never truncated on a narrow terminal."""

from __future__ import annotations

import logging
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

TEXT = 24  # least width of a last column with prose
NOISY = ("torchao", "torch.utils._pytree")  # transformers imports torchao where it is installed
Progress = Callable[[int, int], None]
"""Called with (done, total)."""
_shown: list[Any] = []  # the rich.Progress that is on the screen


def say(kind: str, message: object) -> None:
    """Print a message as one line on stderr."""
    print(f"lanternpp: {kind}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line each, equal ones once, and none of torchao's about kernels of other machines."""
    seen: set[str] = set()
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            say("warning", message)

    with warnings.catch_warnings():
        warnings.showwarning = show
        warnings.filterwarnings("ignore", "invalid escape sequence")  # torchao's own
        yield


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A callback that moves a bar with the time elapsed and left, or None where stderr is no terminal.

    A bar that begins while another is shown stands below it.
    """
    if sys.stderr is None or not sys.stderr.isatty():
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
    """Rows under headings. left: columns of words; bold: rows. prose: the last cell may take several lines.

    spare: the last column may be left out where that makes the others fit.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    last = len(headings) - 1
    wide = [max(len(cell) for cell in column) for column in zip(headings, *rows, strict=True)]
    if prose:
        wide[last] = min(wide[last], TEXT)
    room = console.width - sum(wide) - 2 * len(wide) - 1  # beside the columns and the spaces between them
    if spare and room < 0 <= room + wide[last] + 2:
        headings, rows, prose, room = headings[:-1], [row[:-1] for row in rows], False, 0
    if title:
        print(filled(title, console.width))
    if room >= 0:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, heading in enumerate(headings):
            long = prose and place == len(headings) - 1
            justify: Literal["left", "right"] = "left" if place in left or long else "right"
            table.add_column(heading, justify=justify, no_wrap=not long)
        for place, row in enumerate(rows):
            table.add_row(*map(Text, row), style="bold" if place in bold else None)
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
    """Text wrapped to a width, with further lines indented; no word is broken."""
    return textwrap.fill(
        line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
