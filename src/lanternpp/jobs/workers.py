"""Renderers on the workers of a Ray cluster, with the interface of one renderer.

Workers send PNGs back as they finish, so they need no file system in common with the caller. Ray starts a worker that died
again, and has it draw the pictures that it had not sent yet.

`map_batches` of Ray Data would do the same in 40 lines fewer. It installs 263 MB more (PyArrow, pandas), and its results come a
block at a time, so that a killed job loses more pictures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lanternpp.api.options import DrawOptions
from lanternpp.engine.decode import FinishedSample
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import Share, brief, cluster, share
from lanternpp.jobs.job import JobInfo, PlannedImage, differences
from lanternpp.jobs.renderer import Renderer

CHUNK = 4  # most batches that a worker gets at once
RESTARTS = 5  # of a worker that died, after which the job fails


class WorkerPool:
    """Several workers with the interface of one `Renderer`. Raises InputError where the options are wrong."""

    def __init__(self, ray: Any, options: DrawOptions, part: Share, begun: Mapping[str, Any] = {}):
        """begun: as of `Renderer`."""
        self.ray = ray
        actor = ray.remote(Renderer).options(max_restarts=RESTARTS, max_task_retries=-1, **part.options)
        self._workers = [actor.remote(options, threads=part.threads, begun=begun)]
        self.info: JobInfo = self._get(self._workers[0].report.remote())
        self._workers += [actor.remote(options, self.info, part.threads) for _ in range(part.workers - 1)]

    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """As `Drawer.check`, by the first worker."""
        found: tuple[dict[str, str], list[str]] = self._get(self._workers[0].check.remote(list(prompts)))
        return found

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """As `Drawer.render`. Towards the end workers get fewer pictures at a time, so that they finish at about the same time."""
        waiting, finished, length = deque(range(len(images))), 0, self.info.length
        # a worker and the indices of the pictures that it still has to draw; None: it reads its model
        doing: dict[Any, tuple[Any, dict[int, int] | None]] = {
            worker.report.remote(): (worker, None) for worker in self._workers
        }
        while finished < len(images):
            (key,), _ = self.ray.wait(list(doing), num_returns=1)
            worker, left = doing[key]
            if left is None:
                self._compare(self._get(key))
            else:
                try:
                    place, png, sample = self._get(next(key))
                except StopIteration:
                    waiting.extendleft(left.values())
                else:
                    if place in left:
                        finished += 1
                        yield left.pop(place), png, sample
                        if progress:
                            progress(finished * length, len(images) * length)
                    continue
            del doing[key]
            if indices := [waiting.popleft() for _ in range(self._share(len(waiting)))]:
                stream = worker.render.remote([images[index] for index in indices], info=self.info)
                doing[stream] = worker, dict(enumerate(indices))

    def _share(self, waiting: int) -> int:
        """How many of the waiting pictures a worker gets: whole batches, fewer towards the end."""
        batch = self.info.settings.batch_size
        even = -(-waiting // (len(self._workers) * batch))  # batches if all workers got the same number
        return min(batch * min(even, CHUNK), waiting)

    def _get(self, ref: Any) -> Any:
        """A result of a worker. An InputError of its code is raised again, any other error as RuntimeError."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, InputError) else RuntimeError(str(error)) from None
        except self.ray.exceptions.RayError as error:
            raise InputError(
                f"a worker died {RESTARTS + 1} times ({brief(error)}); fewer --actors leave each more memory"
            ) from None

    def _compare(self, info: JobInfo) -> None:
        """InputError where a worker would draw other pictures than the first."""
        old, new = (each.notes(PlannedImage("", 0)) for each in (self.info, info))
        differing = differences(old, new)
        if not differing and old["versions"] != new["versions"]:
            differing = f"versions {old['versions']} -> {new['versions']}"
        if differing:
            raise InputError(
                f"the machines of the cluster would draw different pictures ({differing}); name --device and "
                "--dtype, and give them the same versions"
            )


@contextmanager
def worker_pool(
    address: str, actors: int | None, options: DrawOptions, begun: Mapping[str, Any]
) -> Iterator[WorkerPool]:
    """A pool on the Ray cluster at an address. Its workers end with the block. Raises InputError."""
    with cluster(address, actors) as ray:
        yield WorkerPool(ray, options, share(ray, address, actors, options.device), begun)
