"""Results of `lanternpp tune`: a file beside the model, whose settings are the defaults under the conditions measured.

One entry per method and condition. An entry applies where all of CONDITIONS, and the weights of model and drafter,
are those that it was measured with; elsewhere it is ignored. Threads and the processor's name are recorded and not compared.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lanternpp.api.model import fingerprint
from lanternpp.api.options import DIALS, DraftDials, RuleDials, Settings, names
from lanternpp.api.settings import TREE, resolve
from lanternpp.errors import InputError
from lanternpp.models.vq.neighbours import cache_folder
from lanternpp.trees import build_tree
from lanternpp.util.files import write_text
from lanternpp.util.jsonfile import read_object
from lanternpp.util.schema import checked, made

FILE = "tuned.json"
CONDITIONS = ("device", "dtype", "batch_size", "compile", "proposer", "accept", "verify")
DRAFTED = tuple(name for name in names(DraftDials) if name != "verify")
CHOSEN = (*DRAFTED, *names(RuleDials))  # what an entry may set


@dataclass(frozen=True)
class Tuned:
    """The entries of a tuned file."""

    path: Path
    model: Path
    drafter: Path | None
    entries: tuple[dict[str, Any], ...] = ()

    @cached_property
    def weights(self) -> str:
        """A hash of the model and drafter at hand."""
        return fingerprint(self.model, self.drafter)

    @classmethod
    def read(cls, model: Path, drafter: Path | None = None) -> Tuned:
        """What was tuned for a model, given as a folder or file, and its drafter, if not its own.

        Raises InputError where the file is damaged.
        """
        path = tuned_path(model)
        return cls(path, model, drafter, _entries(path) if os.access(path, os.F_OK) else ())

    def settings(self, method: str, conditions: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults that an entry sets for a method under these conditions; {} where none was measured so."""
        here = {"method": method, "weights": self.weights, "where": {k: conditions[k] for k in CONDITIONS}}
        return next((dict(e["settings"]) for e in self.entries if here.items() <= e.items()), {})

    def last_method(self) -> str | None:
        """The method that was tuned last for this model and drafter, under any conditions."""
        mine = [entry["method"] for entry in self.entries if entry["weights"] == self.weights]
        return mine[-1] if mine else None

    def knows(self, settings: Mapping[str, Any]) -> bool:
        """Whether the tree or the window of settings is one that was found for their method."""
        return any(
            entry["method"] == settings["method"]
            and all(settings[name] == value for name, value in entry["settings"].items() if name in DRAFTED)
            for entry in self.entries
        )

    def check(self) -> None:
        """InputError where the file could not be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path.parent):
                return
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be written: {error.strerror}; with --no-save nothing is"
            ) from None

    def add(
        self, method: str, conditions: Mapping[str, Any], settings: Mapping[str, Any], **more: Any
    ) -> None:
        """Write an entry in place of the one for the same method, weights and conditions. Raises InputError."""
        here = {"method": method, "weights": self.weights, "where": {k: conditions[k] for k in CONDITIONS}}
        now = _entries(self.path) if self.path.is_file() else ()
        kept = [other for other in now if not here.items() <= other.items()]
        entry = here | {"settings": dict(settings), **more}
        write_text(self.path, json.dumps({"tuned": [*kept, entry]}, indent=1) + "\n")


def tuned_path(model: Path) -> Path:
    """Beside the model where that is a folder of the user's; else in the user's cache, under the model's name there.

    What the hub fetched is the hub's.
    """
    fetched = any(part.startswith("models--") for part in model.absolute().parts)
    folder = cache_folder(Path(__file__)) if fetched or not model.is_dir() else cache_folder(model)
    return folder / (FILE if folder == model else f"tuned-{fingerprint(model)}.json")


@dataclass(frozen=True)
class _Entry:
    """What is read of an entry."""

    method: str
    weights: str
    where: Mapping[str, Any]
    settings: Mapping[str, Any]


def _entries(path: Path) -> tuple[dict[str, Any], ...]:
    """The entries of a file; InputError unless each can be applied, as far as `resolve` does not check it."""
    try:
        entries: tuple[dict[str, Any], ...]
        entries = checked("tuned", read_object(path).get("tuned"), tuple[dict[str, Any], ...])
        for entry in entries:
            chosen = made(_Entry, entry).settings
            if extra := chosen.keys() - set(CHOSEN):
                raise InputError(f"it sets {min(extra)}")
            if chosen.get("tree") is None and chosen.get("window") is None:
                raise InputError("it sets neither a tree nor a window")
            for name, value in chosen.items():
                checked(name, value, DIALS[name].kind | None)
            build_tree(chosen.get("tree") or TREE)
    except InputError as error:
        remedy = "run `lanternpp tune` again, or remove it"
        raise InputError(f"{path} is damaged ({error}); {remedy}") from None
    return entries


def with_tuned(defaults: Mapping[str, Any], method: str, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """A model's defaults with what was tuned for a method in place of theirs, which is then not fitted."""
    rows = defaults.get("methods", {})
    return {**defaults, "methods": {**rows, method: {**rows.get(method, {}), **tuned, "fit": False}}}


def resolve_tuned(
    method: str,
    defaults: Mapping[str, Any],
    overrides: Mapping[str, Any],
    auto: bool,
    tuned: Tuned | None,
    conditions: Callable[[Settings], Mapping[str, Any]],
) -> Settings:
    """`resolve`, with what was tuned for a method under the conditions that its settings mean. InputError."""
    if not (tuned and tuned.entries):
        return resolve(method, defaults, overrides, auto)
    # an override of the tree, or of a window's dial, leaves the other dials that were tuned
    usual = resolve(method, defaults, {k: v for k, v in overrides.items() if k not in DRAFTED}, auto)
    found = tuned.settings(method, conditions(usual))
    return resolve(method, with_tuned(defaults, method, found) if found else defaults, overrides, auto)
