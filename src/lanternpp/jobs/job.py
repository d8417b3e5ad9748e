"""A job: planning its pictures, finding those that its folder lacks, and drawing these, each written as soon as finished."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from lanternpp.api.fit import plain_settings
from lanternpp.api.options import BASELINE, Settings
from lanternpp.api.picture import png_notes
from lanternpp.api.results import Setup, Stats
from lanternpp.api.settings import convert_override, with_tree
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError, counted
from lanternpp.util import jsonfile
from lanternpp.util.files import digest, replacing, slug, sweep

MAX_WARNINGS = 5  # warnings about prompts that are shown in full
IGNORED_SETTINGS = ("int8", "tuned")  # in the notes of a PNG; the picture does not depend on them


@dataclass(frozen=True)
class PlannedImage:
    """A picture that a job has to draw."""

    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """SLUG-HASH-SEED.png: the same for the same prompt and seed, another for any other pair."""
        return f"{slug(self.prompt)}-{digest([self.prompt])}-{self.seed}.png"


@dataclass(frozen=True)
class JobInfo:
    """The properties that all pictures of a job share."""

    settings: Settings
    setup: Setup
    effect: str | None = None  # a sentence on weights in 8 bits; None: they are not in 8 bits

    def notes(self, image: PlannedImage) -> dict[str, str]:
        """Return the text chunks of the PNG of a picture."""
        return self.setup.notes(image.prompt, image.seed)


class Drawer(Protocol):
    """Draws the pictures of a job: a `Renderer`, or a `WorkerPool`."""

    info: JobInfo

    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Return the rejected prompts, each with the reason, and the target's warnings about the others, each once."""

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """Draw pictures; yield (index in `images`, PNG, sample without its codes) as they finish, each once.

        Warnings, which `check` returns, are ignored. progress: called with (done, all).
        """


def plan_images(prompts: Sequence[str], n: int, seed: int) -> list[PlannedImage]:
    """Plan n pictures of each different prompt, with seed, seed + 1, ... ."""
    return [PlannedImage(prompt, seed + i) for prompt in dict.fromkeys(prompts) for i in range(n)]


def missing_images(
    folder: Path, planned: Sequence[PlannedImage], info: JobInfo, overwrite: bool = False
) -> list[PlannedImage]:
    """Return the pictures whose file is missing or damaged; with `overwrite`, also those drawn with other settings.

    Raises InputError for a picture drawn with other settings unless `overwrite`.
    """
    missing_images = []
    for image in planned:
        path = folder / image.name
        existing = png_notes(path)
        differing = None if existing is None else differences(existing, info.notes(image))
        if existing is None or (differing and overwrite):
            missing_images.append(image)
        elif differing:
            raise InputError(
                f"{path} was drawn with other settings ({differing}); choose another folder, or replace such "
                "pictures with --overwrite"
            )
    return missing_images


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the settings that differ between the notes of two PNGs, such as "cfg 2.0 -> 3.0"; "" where none does.

    Versions are noted but not compared, so that a job can go on after an update.
    """
    return "; ".join(jsonfile.differences(_deciding(old), _deciding(new)))


def drawn_settings(folder: Path, planned: Sequence[PlannedImage]) -> dict[str, Any]:
    """Return the settings of the first picture that the folder has already; empty where it has none."""
    existing = (png_notes(folder / image.name) for image in planned)
    return next((_deciding(picture_notes) for picture_notes in existing if picture_notes), {})


def with_draft_of(settings: Settings, picture_settings: Mapping[str, Any]) -> Settings | None:
    """Return these settings with the draft of a picture that was drawn before; None where more than the draft differs.

    So a job that goes on draws the same bytes after another fit. Plain decoding counts as a draft where the fit has chosen it.
    """
    is_fitted = picture_settings.get("fit") is True
    with suppress(InputError):  # any program may have written the settings of a picture
        if not is_fitted:  # the picture was drawn before acceptance rates were known
            candidate = settings
        elif picture_settings.get("method") == BASELINE:
            candidate = plain_settings(settings)
        elif settings.window is not None:
            candidate = replace(settings, window=convert_override("window", picture_settings.get("window")))
        else:
            candidate = with_tree(settings, str(picture_settings.get("tree")))
        candidate = replace(candidate, fit=is_fitted)
        if all(picture_settings.get(name) == value for name, value in asdict(candidate).items()):
            return candidate
    return None


def _deciding(notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the notes on which the bytes of a picture depend; each setting is an entry."""
    deciding: dict[str, Any] = {key: notes.get(key) for key in ("prompt", "shown", "seed", "images", "model")}
    with suppress(InputError):
        settings = jsonfile.parse_json(notes.get("settings", "{}"), "the settings")
        if isinstance(settings, dict):
            deciding |= {key: value for key, value in settings.items() if key not in IGNORED_SETTINGS}
    return deciding


def run(
    renderer: Drawer,
    planned: Sequence[PlannedImage],
    folder: Path,
    prompts: Path,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Stats, int]:
    """Draw the pictures that `folder` lacks; return their statistics, and the number of pictures that it had already.

    prompts: the file with the prompts, which error messages name. Seconds cover drawing and writing, not loading. Raises
    InputError before the first picture where the target rejects a prompt or a file was drawn with other settings, and
    later where a picture cannot be written; pictures that are written by then stay.
    """
    sweep(folder, stale=0)  # the folder is locked, so no other job is writing its temporary files
    info = renderer.info
    images = missing_images(folder, planned, info, overwrite)
    if images:
        rejected, prompt_warnings = renderer.check(list(dict.fromkeys(image.prompt for image in images)))
        if rejected:
            raise InputError(rejection_message(rejected, prompts))
        for warning in prompt_warnings[:MAX_WARNINGS]:
            warnings.warn(warning, stacklevel=2)
        num_hidden = len(prompt_warnings) - MAX_WARNINGS
        if num_hidden > 0:
            warnings.warn(f"{counted(num_hidden, 'more warning')} of this kind", stacklevel=2)
    samples = []
    start = time.perf_counter()
    for index, png, sample in renderer.render(images, progress):
        with replacing(folder / images[index].name) as temporary:
            temporary.write_bytes(png)
        samples.append(sample)
    stats = Stats.of(info.setup, samples, time.perf_counter() - start)
    return stats, len(planned) - len(images)


def rejection_message(rejected: Mapping[str, str], prompts: Path) -> str:
    """Name the first rejected prompt by its line in the file, with the reason, and the number of further ones."""
    lines = [line.strip() for line in jsonfile.read_text(prompts, most=jsonfile.MAX_LOG_BYTES).split("\n")]
    prompt, reason = next(iter(rejected.items()))
    line = f", line {lines.index(prompt) + 1}" if prompt in lines else ""
    others = f" ({counted(len(rejected) - 1, 'more line')} cannot be drawn)" if len(rejected) > 1 else ""
    return f"{prompts}{line}: {reason}{others}"
