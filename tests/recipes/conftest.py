"""A tiny imagefolder of coloured shapes, models for it, and the scripts that train on them."""

import shutil
from pathlib import Path

import pytest
from helpers.photos import command, data, draw, model, ready, tokenizer
from helpers.stages import diffusion, eagle, kl, mixture

__all__ = ["command", "data", "model", "ready", "tokenizer"]


@pytest.fixture(scope="session")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(pictures, a model of latents with its three networks, all hardly trained)."""
    place = tmp_path_factory.mktemp("latents")
    for split, count in (("train", 12), ("val", 4)):
        draw(place / "data" / split, count)
    for part in (kl, mixture, eagle):
        assert part(place / "data", place / "model")
    return place / "data", place / "model"


@pytest.fixture(scope="session")
def diffusion_model(
    latent_model: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The same with a diffusion head, over the same tokenizer."""
    data, place = latent_model[0], tmp_path_factory.mktemp("diffusion")
    shutil.copytree(latent_model[1] / "tokenizer", place / "tokenizer")
    for part in (diffusion, eagle):
        assert part(data, place)
    return data, place
