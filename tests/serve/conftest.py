"""A tiny model for the server."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.models import write_model


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with 16 times the codes: it draws long enough for requests to come meanwhile."""
    return write_model(tmp_path_factory.mktemp("served") / "long", grid=16)
