"""Where results go: checked before any model work, so that none is lost."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.names import slug


def png_path(path: Path) -> Path:
    """The path, if a PNG can be written there; its folder may still have to be made. Raises InputError."""
    if path.suffix.lower() != ".png":
        raise InputError(f"output {str(path)!r} does not end in .png; pictures are written as PNG")
    if path.exists() and not path.is_file():
        raise InputError(f"output {str(path)!r} is not a file; give a file name that ends in .png")
    check_writable(path, next(p for p in path.absolute().parents if p.exists()))
    return path


def writable_folder(path: Path) -> Path:
    """The path, if it is a folder that can be written to, or can become one. Raises InputError."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise InputError(f"output {str(path)!r} cannot be a folder: {there} is a file")
    check_writable(path, there)
    return path


def check_writable(path: Path, folder: Path) -> None:
    """InputError naming the path where nothing can be written to the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(f"output {str(path)!r} cannot be written: {folder}: {error.strerror}") from None


def free_path(path: Path, told: Mapping[str, str]) -> Path:
    """PATH, or PATH-2, PATH-3 and so on: the first that is free, or holds only pictures that `told` tells of too."""
    from lanternpp.many.planned_images import differences
    from lanternpp.picture import png_notes

    for number in itertools.count(1):
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not free.exists():
            return free
        there = png_notes(free) or {}
        same = not differences(there | {"images": told["images"]}, told)
        if same and _seeds(there) <= _seeds(told):
            return free
    raise AssertionError


def _seeds(told: Mapping[str, str]) -> set[int]:
    """The seeds of the pictures of a PNG, by its notes."""
    try:
        first = int(told["seed"])
        return set(map(int, told.get("seeds", "").split())) or set(range(first, first + int(told["images"])))
    except (KeyError, ValueError):
        return {-1}


def default_path(prompt: str, seed: int) -> Path:
    """out/PROMPT-SEED.png, the prompt's words joined by hyphens."""
    return Path("out") / f"{slug(prompt)}-{seed}.png"


def figures(row: Mapping[str, Any]) -> list[str]:
    """What drawing took, for a reader, by the figures of `Stats.to_json`."""
    from lanternpp.results import drawn_with

    settings, spent = row["settings"], row["tv_spent"]
    measured = settings["measure"] and spent is not None
    return [
        f"{row['seconds_per_image']:.2f} s per picture with {drawn_with(row['method'], row['auto'])} in "
        f"{settings['dtype']} on {settings['device']}",
        f"{row['codes']} codes in {row['passes']} passes",
        f"{row['codes_per_pass']:.2f} codes per pass",
        *([f"spent {spent:.2f} of total variation per picture"] if measured else []),
    ]
