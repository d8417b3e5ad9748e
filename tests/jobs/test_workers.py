"""A pool of workers that fail or differ, on a real local Ray in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.models import write_model
from helpers.refusals import rejects

from lanternpp.api.options import DrawOptions
from lanternpp.jobs import workers
from lanternpp.jobs.cluster import LOCAL, Share, cluster
from lanternpp.jobs.job import PlannedImage
from lanternpp.jobs.renderer import Renderer
from lanternpp.jobs.workers import WorkerPool

IMAGES = [PlannedImage("red tulip", seed) for seed in range(30)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with cluster(LOCAL, 3) as connected:
        yield connected


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DrawOptions:
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return DrawOptions(str(model), device="cpu", dtype="float32", method="ar", overrides={"batch_size": 2})


def pool(ray: Any, options: DrawOptions, workers: int = 2) -> WorkerPool:
    return WorkerPool(ray, options, Share(workers, {"num_cpus": 0}, 1))


def test_workers_that_fail_again_and_again_are_an_error(ray, options, monkeypatch) -> None:
    class EndsItsProcess(Renderer):
        """Its process ends with the first picture."""

        def render(self, images: Any, info: Any) -> Any:
            import os

            yield from ()
            os.kill(os.getpid(), 9)

    monkeypatch.setattr(workers, "Renderer", EndsItsProcess)
    monkeypatch.setattr(workers, "MAX_RESTARTS", 1)
    rejects(re.escape("a worker died 2 times"), list, pool(ray, options, 1).render(IMAGES))


def test_prompts_and_machines_that_cannot_draw_are_rejected(ray, options, tmp_path: Path) -> None:
    made = pool(ray, options, 1)
    rejected, _ = made.check(["red tulip", "pine"])
    assert list(rejected) == ["pine"] and "names no subject" in rejected["pine"]
    own, setup = made.info, made.info.setup
    for other, says in (
        ({"settings": {**setup.settings, "dtype": "bfloat16"}}, "dtype 'bfloat16' -> 'float32'"),
        ({"versions": {**setup.versions, "torch": "1"}}, "versions"),
    ):
        made.info = replace(own, setup=replace(setup, **other))
        rejects(says, list, made.render(IMAGES))
    rejects(
        "^a worker cannot draw: .*missing", pool, ray, replace(options, model=str(tmp_path / "missing")), 1
    )
