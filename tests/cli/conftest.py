"""The command line, run in this process, with a tiny model for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.models import SMALLER, write_model, write_smaller
from PIL import Image

from lanternpp.cli import main
from lanternpp.models.vq.folder import read_vq
from lanternpp.models.vq.model import VQ, VQConfig
from lanternpp.models.words import WordsConfig


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every command runs in an empty folder of its own, with a cache of its own."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("lanternpp.training.rates.PASSES", 10)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `lanternpp` with these arguments."""

    def command(*args: object) -> Outcome:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, captured.out, captured.err)

    return command


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def smaller(tmp_path: Path) -> Callable[..., Path]:
    """Writes another target, of this shape: over the tokenizer in a folder, or over one of its own."""

    def write(tokenizer: Path | None = None, **shape: object) -> Path:
        words = WordsConfig(**{**SMALLER, **shape})
        if tokenizer is None:
            vq = VQ(VQConfig(4 * words.grid, words.vocab, 4, (16, 16), (1, 1), (1, 1)))
        else:
            vq = read_vq(tokenizer, torch.float32)
        return write_smaller(tmp_path / "other", words, vq)

    return write


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A copy of the tiny model, for breaking."""
    return write_model(tmp_path / "broken")


@pytest.fixture
def photos(elsewhere: Path) -> Path:
    """Four photos to train on and two to validate."""
    random = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        (elsewhere / "photos" / split).mkdir(parents=True)
        rows = []
        for i in range(count):
            pixels = random.integers(0, 255, (34, 34, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(elsewhere / "photos" / split / f"{i}.png")
            rows.append(json.dumps({"file_name": f"{i}.png", "text": "a photo of a red tulip"}))
        (elsewhere / "photos" / split / "metadata.jsonl").write_text("\n".join(rows))
    return elsewhere / "photos"
