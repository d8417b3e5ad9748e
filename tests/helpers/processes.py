"""Processes that a test started, to kill some of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def command(pid: int) -> bytes:
    """The command line of a process; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def running(pid: int) -> bool:
    """Whether it has not ended yet."""
    return bool(command(pid))


def _below(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield int(child)
            yield from _below(int(child))


def descendants(pid: int, name: str) -> list[int]:
    """The processes below one whose command has this in it."""
    return [child for child in _below(pid) if name.encode() in command(child)]
