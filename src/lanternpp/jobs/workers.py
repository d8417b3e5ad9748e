"""Renderers on the workers of a Ray cluster, with the interface of one renderer.

Workers send each PNG back when it is finished, so they need no file system in common with the caller. Ray restarts a worker
that died, which then draws its pictures again.

`map_batches` of Ray Data would do the same in 40 lines fewer. But it needs 263 MB more (PyArrow, pandas), and returns results
a block at a time, so that a killed job loses more pictures.
"""

from __future__ import annotations

import math
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

MAX_CHUNK_BATCHES = 4  # batches that a worker gets at once
MAX_RESTARTS = 5  # of a worker; the job fails when it dies once more


class WorkerPool:
    """Several workers with the interface of one `Renderer`. Raises InputError where the options are wrong."""

    def __init__(
        self, ray: Any, options: DrawOptions, resources: Share, drawn_settings: Mapping[str, Any] = {}
    ):
        """drawn_settings: as of `Renderer`."""
        self.ray = ray
        ray_options = {"max_restarts": MAX_RESTARTS, "max_task_retries": -1, **resources.options}
        actor = ray.remote(Renderer).options(**ray_options)
        self._workers = [actor.remote(options, threads=resources.threads, drawn_settings=drawn_settings)]
        self.info: JobInfo = self._get(self._workers[0].report.remote())
        for _ in range(resources.workers - 1):
            self._workers.append(actor.remote(options, self.info, resources.threads))

    def check(self, prompts: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """As `Drawer.check`, by the first worker."""
        result: tuple[dict[str, str], list[str]] = self._get(self._workers[0].check.remote(list(prompts)))
        return result

    def render(
        self, images: Sequence[PlannedImage], progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[int, bytes, FinishedSample]]:
        """As `Drawer.render`. Towards the end workers get fewer pictures at a time, so that they finish at about the same time."""
        waiting = deque(range(len(images)))
        num_finished = 0
        # Each task has its worker and the pictures still to come: position in the task -> index; None: it reads its model.
        tasks: dict[Any, tuple[Any, dict[int, int] | None]] = {
            worker.report.remote(): (worker, None) for worker in self._workers
        }
        while num_finished < len(images):
            (task,), _ = self.ray.wait(list(tasks), num_returns=1)
            worker, unfinished = tasks[task]
            if unfinished is None:
                self._compare(self._get(task))
            else:
                try:
                    position, png, sample = self._get(next(task))
                except StopIteration:
                    waiting.extendleft(unfinished.values())
                else:
                    if position in unfinished:  # not when a restarted worker has drawn a picture again
                        num_finished += 1
                        yield unfinished.pop(position), png, sample
                        if progress:
                            progress(num_finished, len(images))
                    continue
            del tasks[task]
            # A worker gets whole batches, fewer towards the end.
            batch = self.info.settings.batch_size
            num_batches = math.ceil(len(waiting) / batch / len(self._workers))  # if all workers got the same
            num_taken = min(batch * min(num_batches, MAX_CHUNK_BATCHES), len(waiting))
            if indices := [waiting.popleft() for _ in range(num_taken)]:
                stream = worker.render.remote([images[index] for index in indices], info=self.info)
                tasks[stream] = worker, dict(enumerate(indices))

    def _get(self, ref: Any) -> Any:
        """Return a result of a worker. An InputError of its code is raised again, any other error as RuntimeError."""
        try:
            return self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, InputError) else RuntimeError(str(error)) from None
        except self.ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):  # the error's class and text are in the last line
                raise InputError(f"a worker cannot draw: {brief(error).split(': ', 1)[-1]}") from None
            raise InputError(
                f"a worker died {MAX_RESTARTS + 1} times ({brief(error)}); fewer --actors leave each more memory"
            ) from None

    def _compare(self, info: JobInfo) -> None:
        """Raise InputError where a worker would draw other pictures than the first worker."""
        blank = PlannedImage("", 0)
        first_notes, notes = self.info.notes(blank), info.notes(blank)
        differing = differences(first_notes, notes)
        if not differing and first_notes["versions"] != notes["versions"]:
            differing = f"versions {first_notes['versions']} -> {notes['versions']}"
        if differing:
            raise InputError(
                f"the machines of the cluster would draw different pictures ({differing}); name --device and "
                "--dtype, and give them the same versions"
            )


@contextmanager
def worker_pool(
    address: str, actors: int | None, options: DrawOptions, drawn_settings: Mapping[str, Any]
) -> Iterator[WorkerPool]:
    """Yield a pool on the Ray cluster at an address, whose workers end with the block. Raises InputError."""
    with cluster(address, actors) as ray:
        yield WorkerPool(ray, options, share(ray, address, actors, options.device), drawn_settings)
