"""Tables on stdout. On a terminal that is too narrow for a table, each row is a block of lines; nothing is cut."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Literal

TEXT = 24  # least width of a last column with prose


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
    if spare and not fits(wide, console.width) and fits(wide[:-1], console.width):
        headings, rows, prose, wide = headings[:-1], [row[:-1] for row in rows], False, wide[:-1]
    if title:
        print(filled(title, console.width))
    if fits(wide, console.width):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, heading in enumerate(headings):
            long = prose and place == len(headings) - 1
            justify: Literal["left", "right"] = "left" if place in left or long else "right"
            table.add_column(heading, justify=justify, no_wrap=not long)
        for place, row in enumerate(rows):
            table.add_row(*map(Text, row), style="bold" if place in bold else None)
        console.print(table)
    else:
        blocks(headings, rows, console.width)
    if caption:
        print(filled(caption, console.width))


def fits(wide: Sequence[int], width: int) -> bool:
    """Whether columns of these widths, with the spaces between them, fit a terminal of `width` characters."""
    return sum(wide) + 2 * len(wide) + 1 <= width


def blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Print every row as a block of lines; no word is broken."""
    for row in rows:
        print(row[0])
        for heading, cell in zip(headings[1:], row[1:], strict=True):
            if cell:
                print(filled(f"  {heading}: {cell}", width))
    print()


def filled(line: str, width: int) -> str:
    """Text wrapped to a width, with further lines indented; no word is broken."""
    return textwrap.fill(
        line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
