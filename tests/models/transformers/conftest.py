"""The tiny models, made once a file, and restored after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.cases import CASES, Case

import lanternpp


@pytest.fixture(scope="module")
def known() -> dict[str, Case]:
    """The cases that were made so far."""
    return {}


@pytest.fixture(scope="module")
def made(known: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Each case, made once; the folder of its checkpoint is its model's `name_or_path`."""

    def case(name: str) -> Case:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            known[name] = CASES[name](folder)
            known[name].model.name_or_path = str(folder)
        return known[name]

    return case


@pytest.fixture(autouse=True)
def restored(known: dict[str, Case]) -> Iterator[None]:
    """No test leaves a model accelerated."""
    yield
    for case in known.values():
        lanternpp.restore(case.model)
