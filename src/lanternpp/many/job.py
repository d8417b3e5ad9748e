"""A job: draw what a folder lacks, write each picture whole as it finishes, and count what that took."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanternpp.errors import InputError
from lanternpp.many.orders import Facts, Order, missing
from lanternpp.many.painter import Painter, Refusal
from lanternpp.nn.checkpoints import replacing, sweep

if TYPE_CHECKING:
    from lanternpp.many.pool import Pool

TOLD = 5  # warnings of prompts that are told in full
STALE = 5.0  # seconds after which a dead process no longer writes a picture


@dataclass
class Totals:
    """What a job did. Seconds cover drawing and writing, not loading."""

    facts: Facts
    skipped: int  # were there already
    drawn: int = 0
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # codes decided by each pass of each picture
    spent: list[float] = field(default_factory=list)  # tv_spent of each picture; empty: not measured

    @property
    def codes_per_pass(self) -> float | None:
        """Codes / passes; None where nothing was drawn."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def seconds_per_image(self) -> float | None:
        """None where nothing was drawn."""
        return self.seconds / self.drawn if self.drawn else None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, its keys those of `Stats`, with the pictures that were skipped."""
        return {
            "method": self.facts.method,
            "model": self.facts.model,
            "images": self.drawn,
            "skipped": self.skipped,
            "codes": sum(self.accepted),
            "passes": len(self.accepted),
            "codes_per_pass": self.codes_per_pass,
            "seconds": self.seconds,
            "seconds_per_image": self.seconds_per_image,
            "accepted_per_pass": self.accepted,
            "settings": dict(self.facts.settings),
            "versions": dict(self.facts.versions),
            "auto": self.facts.auto,
            "tv_spent": sum(self.spent) / len(self.spent) if self.spent else None,
        }


def run(
    painter: Painter | Pool,
    wanted: Sequence[Order],
    folder: Path,
    prompts: Path,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Totals:
    """Draw the pictures that `folder` lacks. `prompts`: the file they were read from, for a refusal's sentence.

    Raises InputError before the first picture where a prompt cannot be drawn or a file of other settings is in
    the way, and in the middle where a picture cannot be written; what is written by then stays.
    """
    sweep(folder, STALE)
    todo = missing(folder, wanted, painter.facts, overwrite)
    totals = Totals(painter.facts, skipped=len(wanted) - len(todo))
    if not todo:
        return totals
    refused, told = painter.check(list(dict.fromkeys(order.prompt for order in todo)))
    if refused:
        raise InputError(sentence(refused, prompts))
    for one in told[:TOLD]:
        warnings.warn(one, stacklevel=2)
    if len(told) > TOLD:
        warnings.warn(f"{len(told) - TOLD} more prompts have warnings of this kind", stacklevel=2)
    began = time.perf_counter()
    for place, drawn in painter.paint(todo, progress):
        with replacing(folder / todo[place].name) as temporary:
            temporary.write_bytes(drawn.png)
        totals.drawn += 1
        totals.accepted += drawn.accepted
        totals.spent += [] if drawn.tv_spent is None else [drawn.tv_spent]
        totals.seconds = time.perf_counter() - began
    sweep(folder, STALE)
    return totals


def sentence(refused: Sequence[Refusal], prompts: Path) -> str:
    """The first refusal, with its line, and how many more there are."""
    lines = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines()]
    first = refused[0]
    more = f" ({len(refused) - 1} more lines cannot be drawn)" if len(refused) > 1 else ""
    at = f", line {lines.index(first.prompt) + 1}" if first.prompt in lines else ""
    return f"{prompts}{at}: {first.why}{more}"
