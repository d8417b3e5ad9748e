"""A run's log: a file with a line of JSON for each thing done, so that a run stopped at any moment goes on from there.

A kill while a line is written leaves a part of it at the end of the file, which is taken off when the log is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lanternpp.errors import InputError
from lanternpp.util.files import write_text
from lanternpp.util.jsonfile import LINES, key_of, parse_json, read_text

T = TypeVar("T")


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a log, which is made where it is missing. Raises InputError where it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def read_rows(path: Path, parse: Callable[[Any], T], remedy: str) -> list[T]:
    """The results of `parse` for every row; none where there is no log. InputError names a damaged line and the remedy."""
    rows = []
    for number, line in enumerate(_whole_lines(path, remedy), 1):
        try:
            rows.append(parse(parse_json(line, "it")))
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path}, line {number}, is damaged: {remedy}") from None
    return rows


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> None:
    """Remove from a log every row for which `keep` is false, or that cannot be read."""
    kept = []
    for line in _whole_lines(path, "remove it"):
        with suppress(ValueError, TypeError, AttributeError):
            kept += [f"{line}\n"] if keep(parse_json(line, "it")) else []
    if path.exists():
        write_text(path, "".join(kept))


def _whole_lines(path: Path, remedy: str) -> list[str]:
    if not path.exists():
        return []
    text = read_text(path, remedy, LINES)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    return whole.splitlines()


class Journal(dict[str, Any]):
    """Measurements in a log, each under the text of a key, so that a run that was stopped measures none of them twice.

    Raises InputError, which ends with the remedy, where a line is damaged.
    """

    def __init__(self, path: Path, remedy: str):
        super().__init__(read_rows(path, lambda row: (key_of(row["key"]), row["value"]), remedy))
        self.path = path

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """The measurement under a key; measured now, and logged, where there is none."""
        name = key_of(key)
        if name not in self:
            value = measure()
            append(self.path, {"key": dict(key), "value": value})
            self[name] = value
        return self[name]
