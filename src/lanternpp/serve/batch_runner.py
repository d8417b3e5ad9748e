"""A batch runner: an engine with fixed settings and a fixed number of rows, and the tickets in its slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image
from torch import Tensor

from lanternpp.api.settings import Settings
from lanternpp.engine.batching import adaptive_threads
from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.serve.tickets import FinishedImage, Progress, Ticket

Pixels = Callable[[Tensor], list[Image.Image]]


class BatchRunner:
    """Draws up to `rows` pictures at the same time; each of them has a slot.

    key: the settings that the requests gave, with a batch size of 1. settings: those of the engine, which may differ from
    them, because the draft is fitted to a batch size.
    """

    def __init__(self, engine: Engine, key: Settings, settings: Settings, pixels: Pixels):
        """pixels: turns codes [pictures, length] into pictures."""
        self.engine, self.key, self.settings, self.pixels = engine, key, settings, pixels
        self.rows = settings.batch_size
        self.threads = adaptive_threads(engine)
        self.occupied: dict[int, tuple[Ticket, float]] = {}  # slot -> ticket, `busy_seconds` when it entered
        self.busy_seconds = 0.0  # computed so far
        self.virtual_time = 0.0  # those seconds, each divided by the number of pictures in it at the time
        self.last_used = 0.0  # time.monotonic() after its latest step
        self.steps = self.codes = 0  # passes of finished pictures, and the codes that these decided

    @property
    def free(self) -> int:
        """Number of slots without a picture."""
        return self.rows - len(self.occupied)

    @property
    def clients(self) -> list[str]:
        """The clients of the pictures in its slots, each once."""
        return list(dict.fromkeys(ticket.spec.client for ticket, _ in self.occupied.values()))

    def admit(self, ticket: Ticket) -> None:
        """Prefill the prompt of a ticket into a free slot. Raises InputError where the target refuses the prompt."""
        slot = next(i for i in range(self.rows) if i not in self.occupied)
        self.occupied[slot] = (ticket, self.busy_seconds)
        try:
            with self._timed(), self.threads:
                self.engine.admit(slot, ticket.spec.prompt, ticket.spec.seed, ticket.encoded)
        except InputError:
            self.engine.drop(slot)
            del self.occupied[slot]
            raise

    def step(self) -> list[Ticket]:
        """Run one step of the engine; returns the tickets whose pictures are now finished."""
        self.sweep()
        if not self.occupied:
            return []
        with self._timed(), self.threads:
            self.engine.step()
            self.threads.update()
            done = set(self.engine.done())
        now = time.monotonic()
        for slot, (ticket, _) in self.occupied.items():
            if slot not in done and ticket.due(now):
                ticket.report(self._progress(slot))
        return [self._finish(slot) for slot in list(self.occupied) if slot in done]

    def sweep(self) -> None:
        """Free the slots whose tickets are settled: cancelled, or past their deadline."""
        for slot, (ticket, _) in list(self.occupied.items()):
            if ticket.done:
                self.engine.drop(slot)
                del self.occupied[slot]

    def fail(self, error: Exception) -> None:
        """Let the tickets in all slots fail with this error."""
        for ticket, _ in self.occupied.values():
            ticket.fail(error)
        self.occupied.clear()

    def _finish(self, slot: int) -> Ticket:
        """Give the finished picture of a slot to its ticket, and free the slot."""
        ticket, entered = self.occupied[slot]
        with self._timed():
            harvest = self.engine.collect(slot)
            image = self.pixels(harvest.codes[None])[0]
        del self.occupied[slot]
        self.steps += len(harvest.accepted)
        self.codes += len(harvest.codes)
        started = ticket.started or ticket.submitted
        ticket.finish(
            FinishedImage(
                image=image,
                codes=harvest.codes.cpu(),
                accepted=tuple(harvest.accepted),
                seconds=self.busy_seconds - entered,
                waited=started - ticket.submitted,
                rows=self.rows,
                settings=self.settings,
                tv_cost=harvest.tv_cost,
            )
        )
        return ticket

    def _progress(self, slot: int) -> Progress:
        engine, entered = self.engine, self.occupied[slot][1]
        codes = engine.codes[slot, : int(engine.count[slot])].to("cpu", copy=True)
        accepted = engine.accepted[slot, : int(engine.passes[slot])].tolist()
        return Progress(codes, tuple(accepted), self.busy_seconds - entered)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add the seconds that the block takes to the counters."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self.busy_seconds += seconds
            self.virtual_time += seconds / max(1, len(self.occupied))
