"""A job: draw the pictures that a folder lacks, write each as soon as it is finished, and count passes and seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lanternpp.errors import InputError
from lanternpp.jobs.planned_images import JobInfo, PlannedImage, missing
from lanternpp.jobs.renderer import RefusedPrompt, Renderer
from lanternpp.util.files import replacing, sweep
from lanternpp.util.jsonfile import LINES, read_text

if TYPE_CHECKING:
    from lanternpp.jobs.worker_pool import WorkerPool

SHOWN = 5  # warnings about prompts that are shown in full
STALE = 5.0  # seconds without a change after which a temporary file was left by a process that died


@dataclass
class Totals:
    """What a job did. Seconds cover drawing and writing, not loading."""

    info: JobInfo
    skipped: int  # pictures that were there already
    drawn: int = 0
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)  # codes decided by each pass of each picture
    tv_cost: list[float] = field(default_factory=list)  # of each picture; empty: not measured

    @property
    def codes_per_pass(self) -> float | None:
        """Codes / passes; None where nothing was drawn."""
        return sum(self.accepted) / len(self.accepted) if self.accepted else None

    @property
    def seconds_per_image(self) -> float | None:
        """Seconds per picture; None where nothing was drawn."""
        return self.seconds / self.drawn if self.drawn else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the keys of `Stats`, and `skipped`."""
        return {
            "method": self.info.method,
            "model": self.info.model,
            "images": self.drawn,
            "skipped": self.skipped,
            "codes": sum(self.accepted),
            "passes": len(self.accepted),
            "codes_per_pass": self.codes_per_pass,
            "seconds": self.seconds,
            "seconds_per_image": self.seconds_per_image,
            "accepted_per_pass": self.accepted,
            "settings": dict(self.info.settings),
            "versions": dict(self.info.versions),
            "auto": self.info.auto,
            "tv_cost": sum(self.tv_cost) / len(self.tv_cost) if self.tv_cost else None,
        }


def run(
    renderer: Renderer | WorkerPool,
    planned: Sequence[PlannedImage],
    folder: Path,
    prompts: Path,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Totals:
    """Draw the pictures that `folder` lacks. prompts: the file with the prompts, which error messages name.

    Raises InputError before the first picture where the target refuses a prompt or a file was drawn with other settings,
    and later where a picture cannot be written; pictures that are written by then stay.
    """
    sweep(folder, STALE)
    todo = missing(folder, planned, renderer.info, overwrite)
    totals = Totals(renderer.info, skipped=len(planned) - len(todo))
    if not todo:
        return totals
    refused, prompt_warnings = renderer.check(list(dict.fromkeys(image.prompt for image in todo)))
    if refused:
        raise InputError(refusal_message(refused, prompts))
    for warning in prompt_warnings[:SHOWN]:
        warnings.warn(warning, stacklevel=2)
    if len(prompt_warnings) > SHOWN:
        warnings.warn(f"{len(prompt_warnings) - SHOWN} more prompts have warnings of this kind", stacklevel=2)
    began = time.perf_counter()
    for index, image in renderer.render(todo, progress):
        with replacing(folder / todo[index].name) as temporary:
            temporary.write_bytes(image.png)
        totals.drawn += 1
        totals.accepted += image.accepted
        totals.tv_cost += [] if image.tv_cost is None else [image.tv_cost]
        totals.seconds = time.perf_counter() - began
    sweep(folder, STALE)
    return totals


def refusal_message(refused: Sequence[RefusedPrompt], prompts: Path) -> str:
    """The first refused prompt with its line in the file and the reason, and how many more there are."""
    lines = [line.strip() for line in read_text(prompts, most=LINES).splitlines()]
    first = refused[0]
    more = f" ({len(refused) - 1} more lines cannot be drawn)" if len(refused) > 1 else ""
    at = f", line {lines.index(first.prompt) + 1}" if first.prompt in lines else ""
    return f"{prompts}{at}: {first.why}{more}"
