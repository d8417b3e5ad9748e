"""Classes by name: an entry of a registry, or a class of the caller's own, also by "package.module:Class"."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from numbers import Integral
from typing import Any, Self

from lanternpp.errors import InputError

IMPORT_PATH_HINT = (
    "modules are looked for on Python's path and, by the command line, in the current folder: run it in the folder that "
    "holds the module"
)
IMPORT_SOURCE_HINT = (
    "package.module:Class is taken on the command line and in Python, not from a file or a request"
)


class GivenEntry(str):
    """A class or instance that the caller gave in place of a name, as text the name that it was imported by or its class's name.

    Two `GivenEntry` are equal only if they hold the same class or instance, as two classes may have the same name.
    """

    entry: Any

    def __new__(cls, entry: Any, name: str | None = None) -> Self:
        """Wrap a class or an object."""
        entry_class, suffix = (entry, "") if isinstance(entry, type) else (type(entry), " (an object)")
        self = super().__new__(cls, name or f"{entry_class.__module__}:{entry_class.__qualname__}{suffix}")
        self.entry = entry
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenEntry) and self.entry is other.entry

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(id(self.entry))

    def __reduce__(self) -> tuple[object, ...]:
        return GivenEntry, (self.entry, str(self))

    def __deepcopy__(self, memo: object) -> str:
        return str(self)


# Folders that modules are imported from, besides Python's path: the command line's own.
IMPORT_FOLDERS: list[str] = []


def given(kind: str, value: Any) -> str:
    """Return a class, an object or a name, given on the command line or in Python, as a name for `find`; import "package.module:Name".

    Names from files and requests are not for this function. Raise InputError.
    """
    if not isinstance(value, str):
        return GivenEntry(value)
    is_place = ":" in value and not isinstance(value, GivenEntry)
    return GivenEntry(_import_for_user(kind, value), value) if is_place else value


def find(kind: str, name: str, table: Mapping[str, Any], alternative: str = "") -> Any:
    """Return the entry `name` of a registry, or the entry that the caller gave, and import nothing else.

    Raise InputError with the known names if `name` is unknown; alternative: a further allowed value, for the message.
    """
    if isinstance(name, GivenEntry):
        return name.entry
    entry = table.get(name) if isinstance(name, str) else None
    if entry is not None:
        return imported(kind, entry)
    hint = f"; {IMPORT_SOURCE_HINT}" if ":" in str(name) else ""
    raise InputError(unknown(kind, str(name), table) + (f", or {alternative}" if alternative else "") + hint)


def imported(kind: str, entry: Any) -> Any:
    """Import an entry that is text, "package.module:Name" or a module alone; return any other entry unchanged. Raise InputError."""
    if not isinstance(entry, str):
        return entry
    module_name, _, attribute = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
        return getattr(module, attribute) if attribute else module
    except Exception as error:  # a module of the caller's may raise anything
        missing = isinstance(error, ModuleNotFoundError) and module_name.startswith(str(error.name))
        hint = f"; {IMPORT_PATH_HINT}" if missing else ""
        raise InputError(f"{kind} {entry!r} cannot be imported: {error}{hint}") from error


@cache
def import_extensions() -> None:
    """Import the modules in LANTERNPP_IMPORT, separated by commas, which register families and drafters. Raise InputError."""
    for module in filter(None, os.environ.get("LANTERNPP_IMPORT", "").split(",")):
        _import_for_user("LANTERNPP_IMPORT", module.strip())


def _import_for_user(kind: str, entry: str) -> Any:
    """Import an entry that the user named, also from the folders in `IMPORT_FOLDERS`."""
    sys.path += [folder for folder in IMPORT_FOLDERS if folder not in sys.path]
    return imported(kind, entry)


def check_class(kind: str, name: str, entry: Any, base: type) -> None:
    """Check that an entry is a subclass of `base` without abstract methods; raise InputError if it is not."""
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise InputError(
            f"{kind} {str(name)!r} is no class of that kind; give one that derives from {base.__module__}:{base.__name__}"
        )
    if inspect.isabstract(entry):
        methods = ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
        raise InputError(f"{kind} {str(name)!r} cannot be made: it does not define {methods}")


def check_instance(kind: str, name: str, made: Any, base: type, *sizes: str) -> None:
    """Check that an object is a `base` whose attributes `sizes` are whole numbers; raise InputError if it is not."""
    are_whole = [isinstance(getattr(made, size, None), Integral) for size in sizes]
    if not isinstance(made, base) or not all(are_whole):
        numbers = f", with whole numbers as its {' and '.join(sizes)}" if sizes else ""
        raise InputError(
            f"{kind} {str(name)!r} makes a {type(made).__name__}; it must be of {base.__name__}{numbers}"
        )


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the message for an unknown name, with the most similar known name."""
    names = list(names)
    similar = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    return f"{kind} {name!r} is unknown; {hint}known: {', '.join(names)}"
