"""Pictures of workers that die are drawn by others: a pool on a fake Ray in this process, whose workers die on demand."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from lanternpp.api.arguments import DrawOptions
from lanternpp.api.settings import resolve
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import Share
from lanternpp.jobs.planned_images import JobInfo, PlannedImage
from lanternpp.jobs.renderer import FinishedPng, RefusedPrompt
from lanternpp.jobs.worker_pool import WorkerInfo, WorkerPool

SETTINGS = replace(resolve("ar", {}, {}), batch_size=2)
INFO = JobInfo("ar", "toy", {"dtype": "float32", "batch_size": 2}, {"torch": "1"}, length=4)
OPTIONS = DrawOptions("toy", device="cpu", method="ar")
IMAGES = [PlannedImage("tulip", seed) for seed in range(30)]


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class Worker:
    """A `RenderWorker` that draws at once; it ends as `lives` says."""

    def __init__(self, ray: FakeRay, number: int):
        self.ray, self.number = ray, number
        self.open = self.check = self.render = SimpleNamespace()
        for name in ("open", "check", "render"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _open(self, options: DrawOptions, threads: int, infos: object, settings: object) -> object:
        found = WorkerInfo(self.ray.infos.get(self.number, INFO), SETTINGS, None)
        return Ref(RayError("gone") if self.ray.lives.get(self.number) == -1 else found)

    def _check(self, prompts: list[str]) -> object:
        return Ref(([RefusedPrompt(p, "no") for p in prompts if p == "pine"], []))

    def _render(self, images: list[PlannedImage]) -> Iterator[object]:
        self.ray.given.append(len(images))
        for index, image in enumerate(images):
            if self.ray.lives.get(self.number, 1000) <= 0:
                yield Ref(RayError("killed"))
                return
            self.ray.lives[self.number] = self.ray.lives.get(self.number, 1000) - 1
            yield Ref((index, FinishedPng(b"%d" % image.seed, [4], None)))


@dataclass(eq=False)
class Ref:
    """A result, or how getting it fails."""

    value: object


class FakeRay:
    """As much of the module `ray` as a pool uses. lives: pictures until a worker dies, by the order of their start."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, lives: dict[int, int] | None = None, infos: dict[int, JobInfo] | None = None):
        self.lives, self.infos = lives or {}, infos or {}
        self.started = 0
        self.chance = random.Random(0)
        self.given: list[int] = []

    def remote(self, kind: type) -> FakeRay:
        def start() -> Worker:
            self.started += 1
            return Worker(self, self.started - 1)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def wait(self, keys: list[object], num_returns: int) -> tuple[list[object], list[object]]:
        first = self.chance.choice(keys)
        return [first], [key for key in keys if key is not first]

    def get(self, ref: Ref) -> object:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: Worker) -> None:
        pass


def pool(ray: FakeRay, actors: int = 2) -> WorkerPool:
    return WorkerPool(ray, OPTIONS, actors, Share(1, 0), 1)


@pytest.mark.parametrize("lives", [{}, {0: 3}, {1: 0}, {0: 5, 1: 1, 2: 0, 3: 2, 4: -1}, {0: -1, 1: -1}])
def test_every_picture_comes_once_whoever_dies(lives) -> None:
    ray = FakeRay(dict(lives))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drawn = list(pool(ray).render(IMAGES))
    assert bool(caught) == bool(lives)
    assert sorted(place for place, _ in drawn) == list(range(30))
    assert all(one.png == b"%d" % place for place, one in drawn)
    assert ray.started >= 2 + bool(lives)


def test_shares_shrink_towards_the_end() -> None:
    ray = FakeRay()
    list(pool(ray).render(IMAGES))
    assert ray.given[0] == 8 and ray.given[-1] == 2 and sum(ray.given) == 30


@pytest.mark.filterwarnings("ignore:a worker died")
def test_workers_that_keep_dying_are_given_up() -> None:
    with pytest.raises(InputError, match=re.escape("died 7 times in a row without a picture (killed)")):
        list(pool(FakeRay(dict.fromkeys(range(100), 0))).render(IMAGES))
    with pytest.raises(InputError, match="4 times"):
        pool(FakeRay(dict.fromkeys(range(100), -1)), actors=1)


def test_machines_that_would_draw_otherwise_are_refused() -> None:
    other = replace(INFO, settings={**INFO.settings, "dtype": "bfloat16"})
    with pytest.raises(InputError, match="dtype float32, now bfloat16"):
        list(pool(FakeRay(infos={1: other})).render(IMAGES))
    newer = replace(INFO, versions={"torch": "2"})
    with pytest.raises(InputError, match="versions"):
        list(pool(FakeRay(infos={1: newer})).render(IMAGES))


def test_a_workers_refusal_is_the_callers() -> None:
    ray = FakeRay()
    workers = pool(ray)
    assert workers.check(["tulip", "pine"]) == ([RefusedPrompt("pine", "no")], [])
    ray.get = lambda ref: (_ for _ in ()).throw(RayTaskError(InputError("no such file")))
    with pytest.raises(InputError, match="no such file"):
        list(workers.render(IMAGES))
