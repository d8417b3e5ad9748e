"""A tiny model for the server, one whose steps wait, and OpenAI's client of a module's `server`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from helpers.models import write_model
from helpers.served import PacedPipe

from lanternpp import Pipeline


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with 16 times the codes: it draws long enough for requests to come meanwhile."""
    return write_model(tmp_path_factory.mktemp("served") / "long", grid=16)


@pytest.fixture
def slow(pipe: Pipeline) -> PacedPipe:
    """The tiny model; its engines step when they are allowed to."""
    return PacedPipe(pipe)


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made
