"""Entries by name: of a room's dict, or "package.module:Class" for a class of the caller's own."""

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

WHERE = (
    "modules are looked for on Python's path and, by the command line, in the current folder: run it in the folder that "
    "holds the module"
)
ENTRIES_ALONE = (
    "package.module:Class is taken on the command line and in Python, not from a file or a request"
)


class Importable(str):
    """A name given on the command line or in Python, which may be "package.module:Class" or a file.

    It is equal to the plain name. Names from files and requests are plain `str`, which `find` looks up in the registry and
    never imports; writing a name as JSON or text loses this class.
    """


class Given(Importable):
    """A class or instance that the caller gave in place of a name; its text is the class's name.

    Two are equal only if they hold the same class or instance, as two classes may have the same name.
    """

    entry: Any

    def __new__(cls, entry: Any) -> Self:
        """The name of a class or object."""
        kind = entry if isinstance(entry, type) else type(entry)
        made = super().__new__(
            cls, f"{kind.__module__}:{kind.__qualname__}" + ("" if kind is entry else " (an object)")
        )
        made.entry = entry
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and self.entry is other.entry

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((str(self), id(self.entry)))

    def __deepcopy__(self, memo: object) -> str:
        return str(self)


HERE: list[str] = []  # folders in which names are looked for beside Python's path: the command line's own


def importable(name: Any) -> Any:
    """A value as the caller gave it: a name may be imported, anything else stays as it is."""
    return Importable(name) if isinstance(name, str) and not isinstance(name, Importable) else name


def find(kind: str, name: str, table: Mapping[str, Any], also: str = "") -> Any:
    """The entry `name` of a registry; an `Importable` of the form "package.module:Name" is imported.

    Raises InputError naming what exists; `also`: other things that may be given.
    """
    if isinstance(name, Given):
        return name.entry
    entry = table.get(name) if isinstance(name, str) else None
    if entry is not None:
        return imported(kind, entry)
    if isinstance(name, Importable) and ":" in name:
        return _given(kind, str(name))
    colon = f"; {ENTRIES_ALONE}" if ":" in str(name) else ""
    raise InputError(unknown(kind, str(name), table) + (f", or {also}" if also else "") + colon)


def imported(kind: str, entry: Any) -> Any:
    """An entry of a registry, imported where it is text: "package.module:Name", or a module alone. Raises InputError."""
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:  # whatever a module of the caller's raises
        missing = isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name))
        hint = f"; {WHERE}" if missing else ""
        raise InputError(f"{kind} {entry!r} cannot be imported: {error}{hint}") from error


@cache
def import_extensions() -> None:
    """Import the modules that LANTERNPP_IMPORT names, with commas between: they register families and drafters. InputError."""
    for module in filter(None, os.environ.get("LANTERNPP_IMPORT", "").split(",")):
        _given("LANTERNPP_IMPORT", module.strip())


def _given(kind: str, entry: str) -> Any:
    """`imported`, of a name that the user gave, also from the folders in `HERE`."""
    sys.path += [folder for folder in HERE if folder not in sys.path]
    return imported(kind, entry)


def check_class(kind: str, name: str, entry: Any, base: type) -> None:
    """InputError unless an entry is a subclass of `base` without abstract methods."""
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise InputError(
            f"{kind} {str(name)!r} is no class of that kind; give one that derives from {base.__module__}:{base.__name__}"
        )
    if inspect.isabstract(entry):
        lacking = ", ".join(sorted(getattr(entry, "__abstractmethods__", ())))
        raise InputError(f"{kind} {str(name)!r} cannot be made: it does not define {lacking}")


def check_made(kind: str, name: str, made: Any, base: type, *sizes: str) -> None:
    """InputError unless an object is of the class `base` and has these sizes, whole numbers."""
    if not isinstance(made, base) or not all(
        isinstance(getattr(made, size, None), Integral) for size in sizes
    ):
        what = f"makes a {type(made).__name__}; it must be of {base.__name__}, with whole numbers"
        raise InputError(f"{kind} {str(name)!r} {what} as its {' and '.join(sizes)}")


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """The message for an unknown name, with the nearest known one."""
    names = list(names)
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{kind} {name!r} is unknown; {hint}known: {', '.join(names)}"
