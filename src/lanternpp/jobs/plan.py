"""The pictures of a job: which there are, which its folder lacks, and which were drawn with other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lanternpp.api.fit.choice import plain_settings
from lanternpp.api.options import BASELINE, Settings
from lanternpp.api.picture import notes, png_notes
from lanternpp.api.settings import typed, with_tree
from lanternpp.errors import InputError
from lanternpp.util import jsonfile
from lanternpp.util.files import picture_name

NOT_DECIDING = ("int8", "tuned")  # noted among the settings; pictures do not depend on them


@dataclass(frozen=True)
class PlannedImage:
    """A picture that a job has to draw."""

    prompt: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return picture_name(self.prompt, self.seed)


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
        existing = png_notes(path) if path.exists() else None
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
    paths = (folder / image.name for image in planned)
    return next((_deciding(found) for path in paths if path.exists() and (found := png_notes(path))), {})


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
