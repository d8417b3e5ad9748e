"""Look-ups by name: a room's plain dict, or "package.module:Class" for a class of the caller's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from lanternpp.errors import InputError


def find(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry `name` of a registry; an entry or a name of the form "package.module:Name" is imported.

    Raises InputError naming what exists.
    """
    entry = table.get(name, name if ":" in name else None)
    if entry is None:
        raise InputError(unknown(kind, name, table))
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"{kind} {name!r} cannot be imported: {error}") from None


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """The sentence for a name that is not there."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind} {name!r} is unknown; {hint}known: {', '.join(names)}"
