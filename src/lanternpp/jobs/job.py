"""A job: which pictures it has, which of them its folder lacks, and drawing those, each written as soon as it is finished."""

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
from lanternpp.api.picture import notes, png_notes
from lanternpp.api.results import Stats
from lanternpp.api.settings import typed, with_tree
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError
from lanternpp.util import jsonfile
from lanternpp.util.files import digest, replacing, slug, sweep

SHOWN = 5  # warnings about prompts that are shown in full
NOT_DECIDING = ("int8", "tuned")  # noted among the settings; pictures do not depend on them


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

    model: str
    settings: Settings
    noted: dict[str, Any]  # the settings as Pipeline.describe gives them
    versions: Mapping[str, str]
    length: int  # codes of a picture
    auto: str | None = None  # as `Stats.auto`
    effect: str | None = None  # a sentence on weights in 8 bits; None: they are not in 8 bits

    def notes(self, image: PlannedImage) -> dict[str, str]:
        """The text chunks of the PNG of a picture."""
        return notes(image.prompt, image.seed, self.model, self.noted, self.versions)


class Drawer(Protocol):
    """Draws the pictures of a job: a `Renderer`, or a `WorkerPool`."""

    info: JobInfo

    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """The prompts that the target rejects, each with the reason, and its warnings about the others, each once."""

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """Draw pictures; yields (index in `images`, PNG, sample without its codes) as they finish, each once.

        Warnings, which `check` gives, are ignored. progress: called with (decided codes, all codes).
        """


def plan_images(prompts: Sequence[str], n: int, seed: int) -> list[PlannedImage]:
    """n pictures of each different prompt, with seed, seed + 1, ... ."""
    return [PlannedImage(prompt, seed + i) for prompt in dict.fromkeys(prompts) for i in range(n)]


def missing(
    folder: Path, planned: Sequence[PlannedImage], info: JobInfo, overwrite: bool = False
) -> list[PlannedImage]:
    """The pictures whose file is missing or damaged; with `overwrite`, also those drawn with other settings.

    Without `overwrite`, such a file raises InputError.
    """
    found = []
    for image in planned:
        path = folder / image.name
        existing = png_notes(path)
        differing = None if existing is None else differences(existing, info.notes(image))
        if existing is None or (differing and overwrite):
            found.append(image)
        elif differing:
            raise InputError(
                f"{path} was drawn with other settings ({differing}); choose another folder, or replace such "
                "pictures with --overwrite"
            )
    return found


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The settings that differ between the notes of two PNGs, such as "cfg 2.0 -> 3.0"; "" where none does.

    Versions are noted but not compared, so that a job can go on after an update.
    """
    return "; ".join(jsonfile.differences(_deciding(old), _deciding(new)))


def begun(folder: Path, planned: Sequence[PlannedImage]) -> dict[str, Any]:
    """The settings of the first picture that is there already; empty where none is."""
    found = (png_notes(folder / image.name) for image in planned)
    return next((_deciding(each) for each in found if each), {})


def with_draft_of(settings: Settings, drawn: Mapping[str, Any]) -> Settings | None:
    """These settings with the draft of a picture, by its settings; None where those differ in more than the draft.

    So a job that goes on draws the same bytes after another fit. Plain decoding counts as a draft where the fit has chosen it.
    """
    fit = drawn.get("fit") is True
    with suppress(InputError):  # the settings of a picture may be anybody's
        if not fit:  # acceptance was not known yet
            made = settings
        elif drawn.get("method") == BASELINE:
            made = plain_settings(settings)
        elif settings.window is not None:
            made = replace(settings, window=typed("window", drawn.get("window")))
        else:
            made = with_tree(settings, str(drawn.get("tree")))
        made = replace(made, fit=fit)
        return made if asdict(made).items() <= drawn.items() else None
    return None


def _deciding(notes: Mapping[str, str]) -> dict[str, Any]:
    """The part of the notes that decides a picture, as a dictionary; each setting is an entry."""
    found: dict[str, Any] = {key: notes.get(key) for key in ("prompt", "shown", "seed", "images", "model")}
    try:
        settings = jsonfile.parse_json(notes.get("settings", "{}"), "the settings")
    except InputError:
        settings = None
    given = settings if isinstance(settings, dict) else {}
    return found | {key: value for key, value in given.items() if key not in NOT_DECIDING}


def run(
    renderer: Drawer,
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
    lines = [line.strip() for line in jsonfile.read_text(prompts, most=jsonfile.LINES).split("\n")]
    prompt, why = next(iter(rejected.items()))
    others = len(rejected) - 1
    more = f" ({others} more line{'s' * (others > 1)} cannot be drawn)" if others else ""
    at = f", line {lines.index(prompt) + 1}" if prompt in lines else ""
    return f"{prompts}{at}: {why}{more}"
