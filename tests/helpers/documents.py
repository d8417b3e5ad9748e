"""The project's Markdown pages, and what is in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    title: str | None  # the file that it is to be saved as
    text: str

    @property
    def commands(self) -> Iterator[list[str]]:
        """The arguments of every `lanternpp` command in it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["lanternpp"] or ("-m", "lanternpp") in pairwise(words):
                yield words[words.index("lanternpp") + 1 :]


def name(page: Path) -> str:
    """A page, or another file, as a test's name."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[Block]:
    """The blocks of a page in a language."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [Block(page, kind, title or None, text) for kind, title, text in found if kind == language]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may name."""
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(prose(page)))
    return {re.sub(r"\s", "-", each) for each in words}
