"""A pool of workers that die or differ, on a real local Ray in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.models import write_model

from lanternpp.api.options import DrawOptions
from lanternpp.errors import InputError
from lanternpp.jobs import workers
from lanternpp.jobs.cluster import LOCAL, Share, cluster
from lanternpp.jobs.plan import PlannedImage
from lanternpp.jobs.workers import RenderWorker, WorkerPool

IMAGES = [PlannedImage("red tulip", seed) for seed in range(30)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with cluster(LOCAL, 3) as connected:
        yield connected


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DrawOptions:
    model = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return DrawOptions(str(model), device="cpu", dtype="float32", method="ar", overrides={"batch_size": 2})


def pool(ray: Any, options: DrawOptions) -> WorkerPool:
    return WorkerPool(ray, options, 2, Share(0, 0), 1)


def test_every_picture_comes_once_though_workers_die(ray, options, monkeypatch) -> None:
    class Dying(RenderWorker):
        """Its process ends after each second picture of a new one."""

        def render(self, images: Any, info: Any) -> Any:
            import os

            for count, found in enumerate(super().render(images, info)):
                yield found
                if (
                    count == 1
                    and images[0].seed % 16 == 0
                    and not __import__("ray").get_runtime_context().was_current_actor_reconstructed
                ):
                    os.kill(os.getpid(), 9)

    monkeypatch.setattr(workers, "RenderWorker", Dying)
    found = list(pool(ray, options).render(IMAGES))
    assert sorted(index for index, *_ in found) == list(range(30))
    here = workers.Renderer(options)
    expected = {index: png for index, png, _ in here.render(IMAGES)}
    assert {index: png for index, png, _ in found} == expected


def test_workers_that_keep_dying_are_given_up(ray, options, monkeypatch) -> None:
    class Dead(RenderWorker):
        """Its process ends with the first picture."""

        def render(self, images: Any, info: Any) -> Any:
            import os

            yield from ()
            os.kill(os.getpid(), 9)

    monkeypatch.setattr(workers, "RenderWorker", Dead)
    monkeypatch.setattr(workers, "RESTARTS", 1)
    with pytest.raises(InputError, match=re.escape("a worker died 2 times")):
        list(pool(ray, options).render(IMAGES))


def test_machines_that_would_draw_otherwise_are_refused(ray, options) -> None:
    made = pool(ray, options)
    own = made.info
    for other, says in (
        (replace(own, noted={**own.noted, "dtype": "bfloat16"}), "dtype bfloat16, now float32"),
        (replace(own, versions={**own.versions, "torch": "1"}), "versions"),
    ):
        made.info = other
        with pytest.raises(InputError, match=says):
            list(made.render(IMAGES))


def test_a_refusal_of_a_worker_is_one_of_the_caller(ray, options, tmp_path: Path) -> None:
    refused, _ = pool(ray, options).check(["red tulip", "pine"])
    assert list(refused) == ["pine"] and "names no subject" in refused["pine"]
    with pytest.raises(InputError, match="missing"):
        pool(ray, replace(options, model=str(tmp_path / "missing")))
