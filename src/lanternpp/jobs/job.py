"""A job: draw the pictures that a folder lacks, and write each as soon as it is finished."""

from __future__ import annotations

import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from lanternpp.api.results import Stats
from lanternpp.errors import InputError
from lanternpp.jobs.plan import PlannedImage, missing
from lanternpp.util.files import replacing, sweep
from lanternpp.util.jsonfile import LINES, read_text

if TYPE_CHECKING:
    from lanternpp.jobs.renderer import Renderer
    from lanternpp.jobs.workers import WorkerPool

LOCK = ".lanternpp.lock"
SHOWN = 5  # warnings about prompts that are shown in full


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while the block runs, so that only one job at a time writes to it.

    The folder is made where it is missing, and then removed if it is left empty. The kernel releases the lock of a process
    that was killed. Raises InputError, which names the process that has the lock, or where the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path).acquire(blocking=False)
        path.write_text(f"{os.getpid()} on {platform.node()}", encoding="utf-8")
    except Timeout:
        holder = ""
        with suppress(OSError):  # it ends now, and has removed the file
            holder = path.read_text(encoding="utf-8")
        raise InputError(
            f"{folder} is being filled by another process ({holder or 'just started'}); wait for it to end, or choose "
            "another folder"
        ) from None
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                for each in made:
                    each.rmdir()


def run(
    renderer: Renderer | WorkerPool,
    planned: Sequence[PlannedImage],
    folder: Path,
    prompts: Path,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Stats, int]:
    """Draw the pictures that `folder` lacks; their statistics, and the number of those that were there already.

    prompts: the file with the prompts, which error messages name. Seconds cover drawing and writing, not loading. Raises
    InputError before the first picture where the target rejects a prompt or a file was drawn with other settings, and
    later where a picture cannot be written; pictures that are written by then stay.
    """
    sweep(folder, stale=0)  # the folder is locked
    info = renderer.info
    todo = missing(folder, planned, info, overwrite)
    if todo:
        rejected, prompt_warnings = renderer.check(list(dict.fromkeys(image.prompt for image in todo)))
        if rejected:
            raise InputError(rejection_message(rejected, prompts))
        for warning in prompt_warnings[:SHOWN]:
            warnings.warn(warning, stacklevel=2)
        if (more := len(prompt_warnings) - SHOWN) > 0:
            warnings.warn(f"{more} more prompts have warnings of this kind", stacklevel=2)
    drawn, began = [], time.perf_counter()
    for index, png, sample in renderer.render(todo, progress):
        with replacing(folder / todo[index].name) as temporary:
            temporary.write_bytes(png)
        drawn.append(sample)
    seconds = time.perf_counter() - began
    return Stats.of(drawn, seconds, info.model, info.noted, info.auto), len(planned) - len(todo)


def rejection_message(rejected: Mapping[str, str], prompts: Path) -> str:
    """The first rejected prompt with its line in the file and the reason, and how many more there are."""
    lines = [line.strip() for line in read_text(prompts, most=LINES).split("\n")]
    prompt, why = next(iter(rejected.items()))
    others = len(rejected) - 1
    more = f" ({others} more line{'s' * (others > 1)} cannot be drawn)" if others else ""
    at = f", line {lines.index(prompt) + 1}" if prompt in lines else ""
    return f"{prompts}{at}: {why}{more}"
