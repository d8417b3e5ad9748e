"""Fixtures: commands that are run in this process, in an empty folder, and how they ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from common import script
from lanternpp.cli import main

STAGES = ["tokenizer"], ["target"], ["classifier"]


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    out: str
    err: str
    made: frozenset[Path]  # new files in the current folder

    @property
    def json(self) -> Any:
        """The output of a command that ended with status 0 and no message."""
        assert (self.code, self.err) == (0, ""), self.err
        return json.loads(self.out)

    def refused(self, *said: str) -> None:
        """Assert status 2, one line of error with these words, and no new file."""
        self.failed(*said)
        assert not self.made

    def failed(self, *said: str) -> None:
        """Assert status 2 and one line of error with these words."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self
        assert self.err.startswith("lanternpp: error: ")
        for words in said:
            assert words in self.err, self.err


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def empty_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own, with a cache of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lanternpp.training.drafter.PASSES", 10)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `lanternpp`, or the script of a recipe's stage, with these arguments."""

    def command(*args: object) -> Outcome:
        before, words = set(Path().rglob("*")), [str(arg) for arg in args]
        with pytest.raises(SystemExit) as end:
            if words[:1] in STAGES:
                script(import_module(words[0]).main, words[1:])
            main(words)
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, captured.out, captured.err, frozenset(Path().rglob("*")) - before)

    return command
