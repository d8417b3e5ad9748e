"""What was measured, a line for each, so that a tuning stopped at any moment goes on where it stopped."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.evaluation.speed import RUN, begin
from lanternpp.jsonfile import LINES as LINES_AT_MOST
from lanternpp.jsonfile import parse_json, read_object, read_text
from lanternpp.nn import checkpoints

LINES = "measurements.jsonl"
RACE, PICTURES = "race", "pictures"


class Journal:
    """A folder with `run.json` (what is tuned, and where) and `measurements.jsonl`.

    optional: where a measurement cannot be written a warning says so, and it serves this process alone.
    Raises InputError where the folder holds a tuning of something else, or cannot be written.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], restart: bool = False, optional: bool = False):
        self.folder, self.optional = folder, optional
        if restart:
            forget(folder)
        begin(folder, json.loads(json.dumps(run)), resume=True)
        self._known: dict[str, Any] = {}
        path = folder / LINES
        if path.exists():
            text = read_text(path, "begin anew with --restart", LINES_AT_MOST)
            whole = text[: text.rfind("\n") + 1]  # a last line cut short by a kill is taken off
            if whole != text:
                checkpoints.write_text(path, whole)
            for number, line in enumerate(whole.splitlines(), 1):
                try:
                    row = parse_json(line, "it")
                    self._known[_name(row["key"])] = row["value"]
                except (ValueError, TypeError, KeyError):
                    raise InputError(
                        f"{path}, line {number}, is damaged; begin anew with --restart"
                    ) from None

    def knows(self, key: Mapping[str, Any]) -> bool:
        """Whether it was measured already."""
        return _name(key) in self._known

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What was measured under a key; measured now, and written down, where it was not before."""
        name = _name(key)
        if name not in self._known:
            value = measure()
            line = json.dumps({"key": dict(key), "value": value}) + "\n"
            try:
                with (self.folder / LINES).open("a", encoding="utf-8") as log:
                    log.write(line)
            except OSError as error:
                fault = f"{self.folder / LINES} cannot be written: {error.strerror}"
                if not self.optional:
                    raise InputError(fault) from None
                warnings.warn(f"what is measured is not kept for the next run: {fault}", stacklevel=2)
            self._known[name] = value
        return self._known[name]


def forget(folder: Path) -> None:
    """Take away what an earlier tuning left in a folder; InputError where the folder is something else's."""
    path = folder / RUN
    if not path.exists():
        return
    try:
        ours = "tuned" in read_object(path)
    except InputError:
        ours = (folder / LINES).exists()
    if not ours:
        raise InputError(f"{folder} holds a run of something else; choose another folder with -o")
    (folder / LINES).unlink(missing_ok=True)
    for name in (RACE, PICTURES):
        shutil.rmtree(folder / name, ignore_errors=True)
    path.unlink()


def _name(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
