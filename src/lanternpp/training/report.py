"""Reports of a training: a progress bar or plain lines, a JSON log, and the provenance beside the weights."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lanternpp.util import files, runlog
from lanternpp.util.progress import times


class Report:
    """Progress on stderr (a bar on a terminal, a line every ten seconds elsewhere) and in `log.jsonl`."""

    def __init__(self, name: str, folder: Path, silent: bool = False):
        self.name, self.log = name, folder / "log.jsonl"
        self.silent = silent  # prints and writes nothing: another process does
        self.terminal = sys.stderr.isatty() and not silent
        self._bar: Any = None
        self._task: Any = None
        self._last_line = time.monotonic()
        self._first: tuple[float, float] | None = None  # (progress, seconds) where this process began
        self._validation = self._final_line = ""

    @contextmanager
    def bar(self, progress: float) -> Iterator[None]:
        """Show the bar while a run lasts."""
        if not self.terminal:
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (TextColumn(self.name), BarColumn(), TaskProgressColumn())
        with Progress(
            *columns, *times(), TextColumn("{task.description}"), console=Console(stderr=True)
        ) as self._bar:
            self._task = self._bar.add_task("", total=1.0, completed=progress)
            yield
        self._bar = None

    def due(self) -> bool:
        """Whether ten seconds have passed since the last line."""
        return time.monotonic() - self._last_line > 10

    def losses(self, step: int, seconds: float, progress: float, figures: Mapping[str, float]) -> None:
        """Mean losses since the last call."""
        self.write({"step": step, "seconds": round(seconds, 2), **figures})
        self.advance(seconds, progress, f"step {step}  {self.text(figures)}{self._validation}")

    def advance(self, seconds: float, progress: float, line: str) -> None:
        """Update the bar; without a bar, print a line if one is due."""
        self._first = self._first or (progress, seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=progress, description=line)
            self._last_line = time.monotonic()
        elif self.due() or (progress >= 1 and line != self._final_line):
            gone, since = progress - self._first[0], seconds - self._first[1]
            left = f"  {(1 - progress) * since / gone / 60:.1f} min left" if gone > 0 and progress < 1 else ""
            self.say(f"{100 * progress:5.1f} %{left}  {line}")
            self._final_line = line if progress >= 1 else ""

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Validation figures."""
        self.write({"step": step, "validation": dict(figures)})
        self._validation = f"  | val {self.text(figures)}"
        if self._bar is None:
            self.say(f"step {step}  validation: {self.text(figures)}")

    def say(self, line: str) -> None:
        """A line on stderr."""
        self._last_line = time.monotonic()
        if self.silent:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(f"{self.name}: {line}", file=sys.stderr, flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        """A row of the log."""
        if not self.silent:
            runlog.append(self.log, row)

    @staticmethod
    def text(figures: Mapping[str, Any]) -> str:
        """`name value` of the numbers among some figures."""
        numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        return "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def provenance(folder: Path, facts: Mapping[str, Any], device: torch.device) -> None:
    """Write `provenance.json`: the command, data, settings and versions that the weights beside it come from."""
    files.write_text(
        folder / "provenance.json",
        json.dumps(
            {
                "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "git": revision(),
                "versions": {"python": platform.python_version(), "torch": torch.__version__},
                "hardware": hardware(device),
                **facts,
            },
            indent=2,
        )
        + "\n",
    )


def revision() -> str | None:
    """The commit of the source, with + where files differ from it; None outside a checkout."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def hardware(device: torch.device) -> str:
    """The GPU, or the processor and the number of threads, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"
