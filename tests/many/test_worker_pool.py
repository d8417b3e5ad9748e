"""Who owes what when workers die: a pool over a Ray of this process, whose workers die when told to."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from lanternpp.arguments import DrawOptions
from lanternpp.cluster import Share
from lanternpp.errors import InputError
from lanternpp.many.orders import Facts, Order
from lanternpp.many.painter import Drawn, Refusal
from lanternpp.many.pool import Opened, Pool
from lanternpp.settings import resolve

SETTINGS = replace(resolve("ar", {}, {}), batch_size=2)
FACTS = Facts("ar", "toy", {"dtype": "float32", "batch_size": 2}, {"torch": "1"}, length=4)
OPTIONS = DrawOptions("toy", device="cpu", method="ar")
ORDERS = [Order("tulip", seed) for seed in range(30)]


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class Worker:
    """An `Artist` that draws at once; it ends as its fate says."""

    def __init__(self, ray: FakeRay, number: int):
        self.ray, self.number = ray, number
        self.open = self.check = self.paint = SimpleNamespace()
        for name in ("open", "check", "paint"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _open(self, options: DrawOptions, threads: int, facts: object, settings: object) -> object:
        found = Opened(self.ray.facts.get(self.number, FACTS), SETTINGS, None)
        return Ref(RayError("gone") if self.ray.lives.get(self.number) == -1 else found)

    def _check(self, prompts: list[str]) -> object:
        return Ref(([Refusal(p, "no") for p in prompts if p == "pine"], []))

    def _paint(self, orders: list[Order]) -> Iterator[object]:
        self.ray.given.append(len(orders))
        for place, order in enumerate(orders):
            if self.ray.lives.get(self.number, 1000) <= 0:
                yield Ref(RayError("killed"))
                return
            self.ray.lives[self.number] = self.ray.lives.get(self.number, 1000) - 1
            yield Ref((place, Drawn(b"%d" % order.seed, [4], None)))


@dataclass(eq=False)
class Ref:
    """A result, or how getting it fails."""

    value: object


class FakeRay:
    """As much of the module `ray` as a pool uses. lives: pictures until a worker dies, by the order of hiring."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, lives: dict[int, int] | None = None, facts: dict[int, Facts] | None = None):
        self.lives, self.facts = lives or {}, facts or {}
        self.hired = 0
        self.chance = random.Random(0)
        self.given: list[int] = []

    def remote(self, kind: type) -> FakeRay:
        def hire() -> Worker:
            self.hired += 1
            return Worker(self, self.hired - 1)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=hire))

    def wait(self, keys: list[object], num_returns: int) -> tuple[list[object], list[object]]:
        first = self.chance.choice(keys)
        return [first], [key for key in keys if key is not first]

    def get(self, ref: Ref) -> object:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: Worker) -> None:
        pass


def pool(ray: FakeRay, actors: int = 2) -> Pool:
    return Pool(ray, OPTIONS, actors, Share(1, 0), 1)


@pytest.mark.parametrize("lives", [{}, {0: 3}, {1: 0}, {0: 5, 1: 1, 2: 0, 3: 2, 4: -1}, {0: -1, 1: -1}])
def test_every_picture_comes_once_whoever_dies(lives) -> None:
    ray = FakeRay(dict(lives))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        drawn = list(pool(ray).paint(ORDERS))
    assert bool(told) == bool(lives)
    assert sorted(place for place, _ in drawn) == list(range(30))
    assert all(one.png == b"%d" % place for place, one in drawn)
    assert ray.hired >= 2 + bool(lives)


def test_shares_shrink_towards_the_end() -> None:
    ray = FakeRay()
    list(pool(ray).paint(ORDERS))
    assert ray.given[0] == 8 and ray.given[-1] == 2 and sum(ray.given) == 30


@pytest.mark.filterwarnings("ignore:a worker died")
def test_workers_that_keep_dying_are_given_up() -> None:
    with pytest.raises(InputError, match=re.escape("died 7 times in a row without a picture (killed)")):
        list(pool(FakeRay(dict.fromkeys(range(100), 0))).paint(ORDERS))
    with pytest.raises(InputError, match="4 times"):
        pool(FakeRay(dict.fromkeys(range(100), -1)), actors=1)


def test_machines_that_would_draw_otherwise_are_refused() -> None:
    other = replace(FACTS, settings={**FACTS.settings, "dtype": "bfloat16"})
    with pytest.raises(InputError, match="dtype float32, now bfloat16"):
        list(pool(FakeRay(facts={1: other})).paint(ORDERS))
    newer = replace(FACTS, versions={"torch": "2"})
    with pytest.raises(InputError, match="versions"):
        list(pool(FakeRay(facts={1: newer})).paint(ORDERS))


def test_a_workers_refusal_is_the_callers() -> None:
    ray = FakeRay()
    workers = pool(ray)
    assert workers.check(["tulip", "pine"]) == ([Refusal("pine", "no")], [])
    ray.get = lambda ref: (_ for _ in ()).throw(RayTaskError(InputError("no such file")))
    with pytest.raises(InputError, match="no such file"):
        list(workers.paint(ORDERS))
