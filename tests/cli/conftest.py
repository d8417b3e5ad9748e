"""The command line, run in this process, with a tiny model for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.commands import empty_dir, run
from helpers.models import SMALLER, save_words, write_model

from lanternpp.models.vq.autoencoder import VQ, VQConfig, read_vq
from lanternpp.models.words import WordsConfig, WordsTarget

__all__ = ["empty_dir", "run"]


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
