"""Which pictures a job is, which of them its folder has already, and what a folder must not mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.jsonfile import parse_json
from lanternpp.names import picture_name
from lanternpp.picture import notes, png_notes

NOT_DECIDING = ("int8", "tuned")  # told beside the settings, but no part of them


@dataclass(frozen=True)
class Order:
    """A picture to draw."""

    prompt: str
    seed: int
    bits: int = 64  # of the prompt's hash in the file's name; 32 in those that earlier versions wrote

    @property
    def name(self) -> str:
        """Of its file."""
        return picture_name(self.prompt, self.seed, self.bits)


@dataclass(frozen=True)
class Facts:
    """What all pictures of a job have in common."""

    method: str
    model: str
    settings: Mapping[str, Any]  # as Pipeline.told
    versions: Mapping[str, str]
    length: int  # codes of a picture
    auto: str | None = None  # as `Stats.auto`

    def notes(self, order: Order) -> dict[str, str]:
        """What the PNG of an order says."""
        return notes(order.prompt, order.seed, self.model, self.settings, self.versions)


def orders(prompts: Sequence[str], n: int, seed: int) -> list[Order]:
    """n pictures of each prompt, those of one prompt with seed, seed + 1, ...; a prompt that comes again adds none."""
    return [Order(prompt, seed + i) for prompt in dict.fromkeys(prompts) for i in range(n)]


def missing(folder: Path, wanted: Sequence[Order], facts: Facts, overwrite: bool = False) -> list[Order]:
    """The orders whose file is not there, or is damaged; with `overwrite`, also what was drawn otherwise.

    Raises InputError naming a file that was drawn with other settings.
    """
    found = []
    for order in wanted:
        if not (folder / order.name).exists():
            older = replace(order, bits=32)
            if (png_notes(folder / older.name) or {}).get("prompt") != order.prompt:
                found.append(order)
                continue
            order = older
        path = folder / order.name
        there = png_notes(path)
        differing = None if there is None else differences(there, facts.notes(order))
        if there is None or (differing and overwrite):
            found.append(order)
        elif differing:
            raise InputError(
                f"{path} was drawn with other settings ({differing}); choose another --out, or replace what "
                "differs with --overwrite"
            )
    return found


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What decides a picture and differs between two PNGs' notes, as "cfg 2.0, now 3.0"; "" where nothing does.

    Versions are told but not compared: a job may go on after an update.
    """
    was, now = _deciding(old), _deciding(new)
    return ", ".join(
        f"{key} {was.get(key)}, now {now.get(key)}"
        for key in dict.fromkeys((*now, *was))
        if was.get(key) != now.get(key)
    )


def _deciding(told: Mapping[str, str]) -> dict[str, Any]:
    """The notes that decide a picture, by name."""
    found: dict[str, Any] = {key: told.get(key) for key in ("prompt", "seed", "images", "model")}
    try:
        settings = parse_json(told.get("settings", "{}"), "the settings")
    except InputError:
        settings = None
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key not in NOT_DECIDING:
            found[key] = value
    return found
