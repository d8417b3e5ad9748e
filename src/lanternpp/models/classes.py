"""The thousand classes of ImageNet-1k by name: the lemmas of their WordNet 3.0 synsets, in the usual order."""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path

from lanternpp.errors import InputError
from lanternpp.models.base import quoted

NAMES = Path(__file__).parent.parent / "assets" / "imagenet" / "classes.txt"
FILLING = re.compile(r"^(?:(?:an?|the|photo|photograph|picture|image|of)\s+)+")


@cache
def classes() -> dict[str, list[int]]:
    """Lower-case names -> the classes they may mean; some names are those of two."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(NAMES.read_text(encoding="utf-8").splitlines()):
        for name in line.lower().split(", "):
            found.setdefault(name, []).append(number)
    return found


def class_of(prompt: str, count: int = 1000) -> int:
    """The class of a prompt: its number below `count`, or one of its names ("golden retriever").

    Raises InputError for an unknown class, naming near ones, and for a name that two classes share.
    """
    words = " ".join(prompt.lower().split())
    if re.fullmatch(r"\d+", words):
        if int(words) >= count:
            raise InputError(f"class {words} does not exist; this model knows 0 to {count - 1}")
        return int(words)
    names = classes() if count == 1000 else {}
    plain = FILLING.sub("", words)
    for name in (words, plain, plain.removesuffix("s"), plain.removesuffix("es")):
        if len(names.get(name, ())) == 1:
            return names[name][0]
        if name in names:
            raise InputError(
                f"{name!r} names {len(names[name])} classes; give a number: {', '.join(map(str, names[name]))}"
            )
    near = difflib.get_close_matches(plain, names, 3)
    near = near or [name for name in names if plain and plain in name.split()][:3]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    known = 'one of ImageNet\'s names, such as "golden retriever", or ' if names else ""
    raise InputError(
        f"class {quoted(prompt)} is unknown; {hint}this model draws {known}a number from 0 to {count - 1}"
    )
