"""The files and folders of results, checked before a model is read, so that no work is lost."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.util.names import slug


def png_path(path: Path, overwrite: bool = False) -> Path:
    """The path, if a PNG can be written there; its folder may still have to be made. Raises InputError.

    overwrite: whether it may take the place of a file that is no picture of lanternpp.
    """
    if path.suffix.lower() != ".png":
        raise InputError(f"output {str(path)!r} does not end in .png; pictures are written as PNG")
    if path.exists() and not path.is_file():
        raise InputError(f"output {str(path)!r} is not a file; give a file name that ends in .png")
    if not overwrite and path.exists() and path.stat().st_size:
        from lanternpp.api.picture import png_notes

        if not (png_notes(path) or {}).keys() >= {"prompt", "seed", "settings"}:
            raise InputError(
                f"output {str(path)!r} is a file that lanternpp has not written; choose another name, or replace it with --overwrite"
            )
    check_writable(path, next(p for p in path.absolute().parents if p.exists()))
    return path


def writable_folder(path: Path) -> Path:
    """The path, if it is a folder that can be written to, or can become one. Raises InputError."""
    existing = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise InputError(f"output {str(path)!r} cannot be a folder: {existing} is a file")
    check_writable(path, existing)
    return path


def check_writable(path: Path, folder: Path) -> None:
    """InputError naming the path where nothing can be written to the folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise InputError(f"output {str(path)!r} cannot be written: {folder}: {error.strerror}") from None


def free_path(path: Path, notes: Mapping[str, str]) -> Path:
    """PATH, or PATH-2, PATH-3 and so on: the first that can be written without losing a picture.

    That is one that does not exist, or has only pictures that the PNG with these notes has too.
    """
    from lanternpp.api.picture import png_notes
    from lanternpp.jobs.plan import differences

    for number in itertools.count(1):
        free = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        if not free.exists():
            return free
        existing = png_notes(free) or {}
        same = not differences(existing | {"images": notes["images"]}, notes)
        if same and _seeds(existing) <= _seeds(notes):
            return free
    raise AssertionError


def _seeds(notes: Mapping[str, str]) -> set[int]:
    """The seeds of the pictures of a PNG, by its notes."""
    try:
        first = int(notes["seed"])
        return set(map(int, notes.get("seeds", "").split())) or set(
            range(first, first + int(notes["images"]))
        )
    except (KeyError, ValueError):
        return {-1}


def default_path(prompt: str, seed: int) -> Path:
    """out/PROMPT-SEED.png, the prompt's words joined by hyphens."""
    return Path("out") / f"{slug(prompt)}-{seed}.png"


def figures(row: Mapping[str, Any]) -> list[str]:
    """The figures of `Stats.to_json` as phrases."""
    from lanternpp.api.results import drawn_with

    settings, spent = row["settings"], row["tv_cost"]
    measured = settings["measure_tv"] and spent is not None
    return [
        f"{row['seconds_per_image']:.2f} s per picture with {drawn_with(row['method'], row['auto'], settings)} in "
        f"{settings['dtype']} on {settings['device']}",
        f"{row['codes']} codes in {row['passes']} passes",
        f"{row['codes_per_pass']:.2f} codes per pass",
        *([f"spent {spent:.2f} of total variation per picture"] if measured else []),
    ]
