"""Painters on the workers of a Ray cluster: each pulls a few pictures at a time; what a dead one owed, another draws.

Workers send PNGs back as they finish, so they share no file system with the caller.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lanternpp.arguments import DrawOptions
from lanternpp.cluster import LOCAL, Share, brief, cluster, share
from lanternpp.errors import InputError
from lanternpp.many.orders import Facts, Order, differences
from lanternpp.many.painter import Drawn, Painter, Refusal
from lanternpp.settings import Settings

CHUNK = 4  # full batches that a worker takes at most
DEATHS = 3  # of each worker, in a row, without a picture


class Artist:
    """A painter in a process of its own."""

    def open(
        self, options: DrawOptions, threads: int, facts: Facts | None, settings: Settings | None
    ) -> Opened:
        """Read the model. facts, settings: those of the first worker, which all others draw with."""
        torch.set_num_threads(threads)
        self.painter = Painter(options, settings)
        own = self.painter.facts
        self.painter.facts = facts or own
        return Opened(own, self.painter.settings, self.painter.effect)

    def check(self, prompts: Sequence[str]) -> tuple[list[Refusal], list[str]]:
        """As `Painter.check`."""
        return self.painter.check(prompts)

    def paint(self, orders: Sequence[Order]) -> Iterator[tuple[int, Drawn]]:
        """As `Painter.paint`."""
        yield from self.painter.paint(orders)


@dataclass(frozen=True)
class Opened:
    """What a worker says when its model is read."""

    facts: Facts
    settings: Settings
    effect: str | None


@dataclass
class Task:
    """What a worker is at: reading its model, or some places of the list."""

    actor: Any
    places: list[int] = field(default_factory=list)
    owed: set[int] = field(default_factory=set)  # places not yet seen


class Pool:
    """Several workers as one painter."""

    def __init__(self, ray: Any, options: DrawOptions, actors: int, part: Share, threads: int):
        self.ray, self.options, self.threads = ray, options, threads
        self._make = ray.remote(Artist).options(max_restarts=0, **part.options).remote
        self._size = actors
        self._first: Opened | None = None
        self._deaths = 0
        self._working: dict[Any, Task] = {}
        self._idle: list[Any] = []
        self._hire()
        while not self._idle:
            self._next()
        for _ in range(actors - 1):
            self._hire()

    @property
    def facts(self) -> Facts:
        """What all pictures have in common: what the first worker found."""
        return self.opened.facts

    @property
    def effect(self) -> str | None:
        """What weights in 8 bits did, where they have 8 bits."""
        return self.opened.effect

    @property
    def opened(self) -> Opened:
        """What the first worker said."""
        assert self._first
        return self._first

    def check(self, prompts: Sequence[str]) -> tuple[list[Refusal], list[str]]:
        """As `Painter.check`, by one worker."""
        while True:
            while not self._idle:
                self._next()
            actor = self._idle.pop()
            try:
                found: tuple[list[Refusal], list[str]] = self._get(actor.check.remote(list(prompts)))
            except self.ray.exceptions.RayError as error:
                self._bury(actor, error)
                continue
            self._idle.append(actor)
            return found

    def paint(
        self, orders: Sequence[Order], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, Drawn]]:
        """(place in the list, picture), each once, as they finish; at most so many at a worker that none waits long."""
        waiting, seen, length = deque(range(len(orders))), 0, self.facts.length
        batch = self.opened.settings.batch_size
        while seen < len(orders):
            while self._idle and waiting:
                fair = -(-len(waiting) // (self._size * batch))  # batches, were they dealt evenly
                take = min(batch * min(fair, CHUNK), len(waiting))
                places = [waiting.popleft() for _ in range(take)]
                actor = self._idle.pop()
                stream = actor.paint.remote([orders[place] for place in places])
                self._working[stream] = Task(actor, places, set(places))
            found, owed = self._next()
            waiting.extendleft(sorted(owed, reverse=True))
            if found is not None:
                seen += 1
                yield found
            if progress:
                progress(seen * length, len(orders) * length)

    def _hire(self) -> None:
        """A new worker begins to read its model."""
        actor = self._make()
        first = self._first
        told = (first.facts, first.settings) if first else (None, None)
        self._working[actor.open.remote(self.options, self.threads, *told)] = Task(actor)

    def _next(self) -> tuple[tuple[int, Drawn] | None, set[int]]:
        """The next thing that happens: a picture, or a death and the places that are owed again, or neither."""
        (key,), _ = self.ray.wait(list(self._working), num_returns=1)
        task = self._working[key]
        try:
            if not task.places:
                self._welcome(self._get(key))
            else:
                try:
                    place, drawn = self._get(next(key))
                except StopIteration:
                    pass
                else:
                    self._deaths = 0
                    task.owed.discard(task.places[place])
                    return (task.places[place], drawn), set()
        except self.ray.exceptions.RayError as error:
            del self._working[key]
            self._bury(task.actor, error)
            return None, task.owed
        del self._working[key]
        self._idle.append(task.actor)
        return None, set()

    def _get(self, ref: Any) -> Any:
        """A result; an error of the worker's own code as it was raised there."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, InputError) else RuntimeError(str(error)) from None

    def _welcome(self, opened: Opened) -> None:
        """The first worker decides; InputError where another would draw other pictures."""
        if self._first is None:
            self._first = opened
            return
        old, new = (one.facts.notes(Order("", 0)) for one in (self._first, opened))
        differing = differences(old, new)
        if not differing and old["versions"] != new["versions"]:
            differing = f"versions {old['versions']}, now {new['versions']}"
        if differing:
            raise InputError(
                f"the machines of the cluster would draw different pictures ({differing}); name --device and "
                "--dtype, and give them the same versions"
            )

    def _bury(self, actor: Any, error: BaseException) -> None:
        """A worker died: hire another. InputError where they keep dying."""
        self.ray.kill(actor)
        warnings.warn("a worker died; another draws what it owed", stacklevel=2)
        self._deaths += 1
        if self._deaths > DEATHS * self._size:
            raise InputError(
                f"the workers died {self._deaths} times in a row without a picture ({brief(error)}); fewer "
                "--actors leave each more memory"
            )
        self._hire()


@contextmanager
def pool(address: str, actors: int | None, options: DrawOptions) -> Iterator[Pool]:
    """A pool on the cluster at an address. Its workers end with the block. Raises InputError."""
    with cluster(address, actors) as ray:
        count, part = share(ray, actors, options.device)
        threads = max(1, torch.get_num_threads() // count) if address == LOCAL else part.cpus
        yield Pool(ray, options, count, part, threads)
