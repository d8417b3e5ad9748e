"""Look-ups by name: a room's plain dict, or "package.module:Class" for a class of the caller's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from lanternpp.errors import InputError

ENTRIES_ALONE = (
    "package.module:Class is taken on the command line and in Python, not from a file or a request"
)


class Importable(str):
    """A name given on the command line or in Python, which may be "package.module:Class" or a file.

    It is equal to the plain name. What a file or a request says stays a plain `str`, which `find` looks up in the
    registry and never imports; JSON and text leave nothing of this class behind.
    """


def importable(name: Any) -> Any:
    """A value as the caller gave it: a name may be imported, anything else stays as it is."""
    return Importable(name) if isinstance(name, str) else name


def find(kind: str, name: str, table: Mapping[str, Any], also: str = "") -> Any:
    """The entry `name` of a registry; an `Importable` of the form "package.module:Name" is imported.

    Raises InputError naming what exists; `also`: what else may be given.
    """
    entry = table.get(name) if isinstance(name, str) else None
    if entry is not None:
        return imported(kind, entry)
    if isinstance(name, Importable) and ":" in name:
        return imported(kind, str(name))
    colon = f"; {ENTRIES_ALONE}" if ":" in str(name) else ""
    raise InputError(unknown(kind, str(name), table) + (f", or {also}" if also else "") + colon)


def imported(kind: str, entry: Any) -> Any:
    """An entry of a registry, imported where it is text of the form "package.module:Name". Raises InputError."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{kind} {entry!r} cannot be imported: {error}") from None


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """The sentence for a name that is not there."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind} {name!r} is unknown; {hint}known: {', '.join(names)}"
