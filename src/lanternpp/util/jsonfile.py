"""JSON that others may have written: read whole, of sane size and depth, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError

MOST, LINES = 1 << 26, 1 << 32  # bytes of a file, and of one that has a line for each of many things
DEEPEST = 64  # lists and objects in each other
REMEDY = "restore it from its source"


def read_json(path: Path, remedy: str = REMEDY) -> Any:
    """What a JSON file holds. Raises InputError, which ends with the remedy, where that cannot be said."""
    return parse_json(read_text(path, remedy), str(path), remedy)


def read_object(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """What a JSON file holds, which must be an object. InputError as `read_json`."""
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise InputError(
            f"{path} holds a {type(content).__name__}, where a JSON object is expected: {remedy}."
        )
    return content


def read_text(path: Path, remedy: str = REMEDY, most: int = MOST) -> str:
    """A text file in UTF-8. Raises InputError where it is missing, no plain file, too large, or other text."""
    try:
        if not path.is_file():
            raise InputError(f"{path} is {'no plain file' if path.exists() else 'missing'}: {remedy}.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): {remedy}.") from None
    if len(content) > most:
        raise InputError(f"{path} is larger than {most >> 20} MiB: {remedy}.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text in UTF-8 (byte {error.start}): {remedy}.") from None


def parse_json(text: str, source: str, remedy: str = REMEDY) -> Any:
    """What JSON says. Raises InputError, which names `source`."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{source} is not valid JSON ({error}): {remedy}.") from None
    except ValueError:  # Python's limit of digits
        raise InputError(f"{source} is not valid JSON (a number of too many digits): {remedy}.") from None
    except RecursionError:
        raise too_deep(source, remedy) from None
    if depth(content) > DEEPEST:
        raise too_deep(source, remedy)
    return content


def too_deep(source: str, remedy: str) -> InputError:
    """The sentence for lists in lists in lists."""
    return InputError(f"{source} nests lists and objects more than {DEEPEST} deep: {remedy}.")


def depth(content: Any) -> int:
    """How many lists and objects lie in each other, counted up to one more than `DEEPEST`."""
    level, found = [content], 0
    while level and found <= DEEPEST:
        inside = [
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        ]
        found += bool(inside)
        level = [one for part in inside for one in part]
    return found
