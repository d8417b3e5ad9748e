"""A log of measurements, one per line, from which a stopped tuning resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lanternpp.errors import InputError
from lanternpp.evaluation.speed import RUN, check_run
from lanternpp.util import runlog
from lanternpp.util.jsonfile import read_object

LINES = "measurements.jsonl"
RACE, PICTURES = "race", "pictures"


class Journal:
    """A folder with `run.json` (what is tuned, and where) and `measurements.jsonl`.

    Raises InputError where the folder holds a tuning of something else, or cannot be written.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], restart: bool = False):
        self.folder = folder
        if restart:
            forget(folder)
        check_run(folder, json.loads(json.dumps(run)), resume=True)
        rows = runlog.read_rows(folder / LINES, _row, "begin anew with --restart")
        self._known: dict[str, Any] = dict(rows)

    def once(self, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
        """What was measured under a key; measured now, and written down, where it was not before."""
        name = _name(key)
        if name not in self._known:
            value = measure()
            try:
                runlog.append(self.folder / LINES, {"key": dict(key), "value": value})
            except OSError as error:
                raise InputError(f"{self.folder / LINES} cannot be written: {error.strerror}") from None
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


def _row(row: Any) -> tuple[str, Any]:
    return _name(row["key"]), row["value"]
