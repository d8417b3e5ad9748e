"""Renderers on the workers of a Ray cluster. Each worker gets a few pictures at a time; if it dies, others draw the rest.

Workers send PNGs back as they finish, so they need no file system in common with the caller.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lanternpp.api.arguments import DrawOptions
from lanternpp.api.settings import Settings
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import LOCAL, Share, brief, cluster, share
from lanternpp.jobs.planned_images import JobInfo, PlannedImage, differences
from lanternpp.jobs.renderer import FinishedPng, RefusedPrompt, Renderer

CHUNK = 4  # most batches that a worker gets at once
MAX_DEATHS = 3  # times the number of workers: deaths in a row without a picture, after which the job fails


class RenderWorker:
    """A renderer in a process of its own, an actor of Ray."""

    def open(
        self, options: DrawOptions, threads: int, info: JobInfo | None, settings: Settings | None
    ) -> WorkerInfo:
        """Read the model. info, settings: those of the first worker, which all others use; None: this is the first."""
        torch.set_num_threads(threads)
        self.renderer = Renderer(options, settings)
        found = self.renderer.info
        self.renderer.info = info or found
        return WorkerInfo(found, self.renderer.settings, self.renderer.effect)

    def check(self, prompts: Sequence[str]) -> tuple[list[RefusedPrompt], list[str]]:
        """As `Renderer.check`."""
        return self.renderer.check(prompts)

    def render(self, images: Sequence[PlannedImage]) -> Iterator[tuple[int, FinishedPng]]:
        """As `Renderer.render`."""
        yield from self.renderer.render(images)


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker reports when it has read its model."""

    info: JobInfo
    settings: Settings
    effect: str | None


@dataclass
class Task:
    """What a worker is doing: drawing the pictures at some indices of the list, or, without indices, reading its model."""

    actor: Any
    indices: list[int] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)  # indices whose pictures have not come yet


class WorkerPool:
    """Several workers with the interface of one `Renderer`."""

    def __init__(self, ray: Any, options: DrawOptions, actors: int, part: Share, threads: int):
        self.ray, self.options, self.threads = ray, options, threads
        self._make = ray.remote(RenderWorker).options(max_restarts=0, **part.options).remote
        self._size = actors
        self._first: WorkerInfo | None = None
        self._deaths = 0
        self._working: dict[Any, Task] = {}
        self._idle: list[Any] = []
        self._start_worker()
        while not self._idle:
            self._next()
        for _ in range(actors - 1):
            self._start_worker()

    @property
    def info(self) -> JobInfo:
        """What all pictures have in common, as the first worker reported it."""
        return self.first.info

    @property
    def effect(self) -> str | None:
        """A sentence on the effect of weights in 8 bits; None: they are not in 8 bits."""
        return self.first.effect

    @property
    def first(self) -> WorkerInfo:
        """What the first worker reported."""
        assert self._first
        return self._first

    def check(self, prompts: Sequence[str]) -> tuple[list[RefusedPrompt], list[str]]:
        """As `Renderer.check`, by one worker."""
        while True:
            while not self._idle:
                self._next()
            actor = self._idle.pop()
            try:
                found: tuple[list[RefusedPrompt], list[str]] = self._get(actor.check.remote(list(prompts)))
            except self.ray.exceptions.RayError as error:
                self._replace(actor, error)
                continue
            self._idle.append(actor)
            return found

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, FinishedPng]]:
        """Draw pictures; yields (index in `images`, picture), each once, as they finish.

        Towards the end workers get fewer pictures at a time, so that they finish at about the same time. progress: called
        with (decided codes, all codes).
        """
        waiting, finished, length = deque(range(len(images))), 0, self.info.length
        batch = self.first.settings.batch_size
        while finished < len(images):
            while self._idle and waiting:
                even = -(
                    -len(waiting) // (self._size * batch)
                )  # batches for each worker, if all got the same number
                take = min(batch * min(even, CHUNK), len(waiting))
                indices = [waiting.popleft() for _ in range(take)]
                actor = self._idle.pop()
                stream = actor.render.remote([images[index] for index in indices])
                self._working[stream] = Task(actor, indices, set(indices))
            found, pending = self._next()
            waiting.extendleft(sorted(pending, reverse=True))
            if found is not None:
                finished += 1
                yield found
            if progress:
                progress(finished * length, len(images) * length)

    def _start_worker(self) -> None:
        """Start a worker, which begins to read its model."""
        actor = self._make()
        first = self._first
        shared = (first.info, first.settings) if first else (None, None)
        self._working[actor.open.remote(self.options, self.threads, *shared)] = Task(actor)

    def _next(self) -> tuple[tuple[int, FinishedPng] | None, set[int]]:
        """Wait for the next event of any worker.

        Returns a picture with its index, or None; and the indices that a worker which died has left undrawn.
        """
        (key,), _ = self.ray.wait(list(self._working), num_returns=1)
        task = self._working[key]
        try:
            if not task.indices:
                self._register(self._get(key))
            else:
                try:
                    index, image = self._get(next(key))
                except StopIteration:
                    pass
                else:
                    self._deaths = 0
                    task.pending.discard(task.indices[index])
                    return (task.indices[index], image), set()
        except self.ray.exceptions.RayError as error:
            del self._working[key]
            self._replace(task.actor, error)
            return None, task.pending
        del self._working[key]
        self._idle.append(task.actor)
        return None, set()

    def _get(self, ref: Any) -> Any:
        """A result of a worker. An InputError of its code is raised again, any other error as RuntimeError."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, InputError) else RuntimeError(str(error)) from None

    def _register(self, reported: WorkerInfo) -> None:
        """Keep what the first worker reports; InputError where a later one would draw other pictures."""
        if self._first is None:
            self._first = reported
            return
        old, new = (worker.info.notes(PlannedImage("", 0)) for worker in (self._first, reported))
        differing = differences(old, new)
        if not differing and old["versions"] != new["versions"]:
            differing = f"versions {old['versions']}, now {new['versions']}"
        if differing:
            raise InputError(
                f"the machines of the cluster would draw different pictures ({differing}); name --device and "
                "--dtype, and give them the same versions"
            )

    def _replace(self, actor: Any, error: BaseException) -> None:
        """Start a new worker for one that died. InputError where workers keep dying without a picture."""
        self.ray.kill(actor)
        warnings.warn("a worker died; another draws its unfinished pictures", stacklevel=2)
        self._deaths += 1
        if self._deaths > MAX_DEATHS * self._size:
            raise InputError(
                f"the workers died {self._deaths} times in a row without a picture ({brief(error)}); fewer "
                "--actors leave each more memory"
            )
        self._start_worker()


@contextmanager
def worker_pool(address: str, actors: int | None, options: DrawOptions) -> Iterator[WorkerPool]:
    """A pool on the Ray cluster at an address. Its workers end with the block. Raises InputError."""
    with cluster(address, actors) as ray:
        count, part = share(ray, actors, options.device)
        threads = max(1, torch.get_num_threads() // count) if address == LOCAL else part.cpus
        yield WorkerPool(ray, options, count, part, threads)
