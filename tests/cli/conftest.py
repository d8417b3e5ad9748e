"""The command line, run in this process, with a tiny model for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import SMALLER, save_words, write_model

from lanternpp.cli import main
from lanternpp.models.vq.autoencoder import VQ, VQConfig, read_vq
from lanternpp.models.words import WordsConfig, WordsTarget


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str
    made: frozenset[Path]  # files that the current folder has since

    @property
    def json(self) -> Any:
        """What a command printed that ended well and said nothing else."""
        assert (self.code, self.err) == (0, ""), self.err
        return json.loads(self.out)

    def refused(self, *said: str) -> None:
        """Status 2, one line, which says this, and no new file."""
        self.failed(*said)
        assert not self.made

    def failed(self, *said: str) -> None:
        """Status 2, and one line, which says this."""
        assert (self.code, self.out, self.err.count("\n")) == (2, "", 1), self
        assert self.err.startswith("lanternpp: error: ")
        for words in said:
            assert words in self.err, self.err


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own, with a cache of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lanternpp.training.drafter.PASSES", 10)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `lanternpp` with these arguments."""

    def command(*args: object) -> Outcome:
        before = set(Path().rglob("*"))
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, captured.out, captured.err, frozenset(Path().rglob("*")) - before)

    return command


@pytest.fixture
def smaller(tmp_path: Path) -> Callable[..., Path]:
    """Writes another target, of this shape: over the tokenizer in a folder, or over one of its own."""

    def write(tokenizer: Path | None = None, **shape: object) -> Path:
        words = WordsConfig(**{**SMALLER, **shape})
        if tokenizer is None:
            vq = VQ(VQConfig(4 * words.grid, 4, (16, 16), (1, 1), (1, 1), codes=words.vocab))
        else:
            vq = read_vq(tokenizer, torch.float32)
        save_words(tmp_path / "other", WordsTarget(words, vq))
        return tmp_path / "other"

    return write


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the tiny model, for breaking."""
    return write_model(tmp_path / "broken")
