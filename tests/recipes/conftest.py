"""A tiny imagefolder of coloured shapes, models for it, and the scripts that train on them."""

import shutil
from pathlib import Path

import pytest
from helpers.commands import empty_dir, run
from helpers.photos import data, model, ready, tokenizer, write_photos
from helpers.stages import diffusion, eagle, kl, mixture

__all__ = ["data", "empty_dir", "model", "ready", "run", "tokenizer"]


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of latents with its three networks, all hardly trained on the pictures of `data`."""
    place = tmp_path_factory.mktemp("latents")
    for split, count in (("train", 12), ("val", 4)):
        write_photos(place / "data" / split, count)
    for part in (kl, mixture, eagle):
        assert part(place / "data", place / "model")
    return place / "model"


@pytest.fixture(scope="session")
def diffused(latents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a diffusion head, over the same tokenizer."""
    place = tmp_path_factory.mktemp("diffusion")
    shutil.copytree(latents / "tokenizer", place / "tokenizer")
    for part in (diffusion, eagle):
        assert part(latents.parent / "data", place)
    return place
