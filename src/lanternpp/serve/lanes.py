"""A lane: an engine of fixed settings and rows, and the tickets that sit in its slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from PIL import Image
from torch import Tensor

from lanternpp.engine.decode import Engine
from lanternpp.errors import InputError
from lanternpp.serve.orders import Drawn, Progress, Ticket
from lanternpp.settings import Settings

Pixels = Callable[[Tensor], list[Image.Image]]


class Lane:
    """Pictures that advance together. `key`: the settings that its orders asked for, whatever was chosen."""

    def __init__(self, engine: Engine, key: Settings, settings: Settings, pixels: Pixels):
        self.engine, self.key, self.settings, self.pixels = engine, key, settings, pixels
        self.rows = settings.batch_size
        self.seats: dict[int, tuple[Ticket, float]] = {}  # slot -> its ticket, and `spent` when it entered
        self.spent = 0.0  # seconds that it computed so far
        self.clock = 0.0  # those seconds per running picture: who is behind steps next
        self.used = 0.0  # when it was last busy
        self.steps = self.codes = 0  # passes over its slots, and codes that they decided

    @property
    def free(self) -> int:
        """Slots without a picture."""
        return self.rows - len(self.seats)

    @property
    def clients(self) -> list[str]:
        """Whose pictures sit in it."""
        return list(dict.fromkeys(ticket.order.client for ticket, _ in self.seats.values()))

    def admit(self, ticket: Ticket) -> None:
        """A picture enters: its prompt's prefill."""
        slot = next(i for i in range(self.rows) if i not in self.seats)
        self.seats[slot] = (ticket, self.spent)
        try:
            with self._timed():
                self.engine.admit(slot, ticket.order.prompt, ticket.order.seed, ticket.encoded)
        except InputError:
            self.engine.drop(slot)
            del self.seats[slot]
            raise

    def step(self) -> list[Ticket]:
        """One step; the tickets that it finished."""
        self.sweep()
        if not self.seats:
            return []
        with self._timed():
            self.engine.step()
            done = set(self.engine.done())
        now = time.monotonic()
        for slot, (ticket, _) in self.seats.items():
            if slot not in done and ticket.due(now):
                ticket.tell(self._progress(slot))
        return [self._finish(slot) for slot in list(self.seats) if slot in done]

    def sweep(self) -> None:
        """Free the slots whose tickets are settled: cancelled, or past their deadline."""
        for slot, (ticket, _) in list(self.seats.items()):
            if ticket.done:
                self.engine.drop(slot)
                del self.seats[slot]

    def fail(self, error: Exception) -> None:
        """End all its pictures."""
        for ticket, _ in self.seats.values():
            ticket.fail(error)
        self.seats.clear()

    def _finish(self, slot: int) -> Ticket:
        """Hand a finished picture over."""
        ticket, before = self.seats[slot]
        with self._timed():
            harvest = self.engine.collect(slot)
            image = self.pixels(harvest.codes[None])[0]
        del self.seats[slot]
        self.steps += len(harvest.accepted)
        self.codes += len(harvest.codes)
        started = ticket.started or ticket.submitted
        ticket.finish(
            Drawn(
                image=image,
                codes=harvest.codes.cpu(),
                accepted=tuple(harvest.accepted),
                seconds=self.spent - before,
                waited=started - ticket.submitted,
                rows=self.rows,
                settings=self.settings,
                tv_spent=harvest.tv_spent,
            )
        )
        return ticket

    def _progress(self, slot: int) -> Progress:
        engine, before = self.engine, self.seats[slot][1]
        codes = engine.codes[slot, : int(engine.count[slot])].to("cpu", copy=True)
        accepted = engine.accepted[slot, : int(engine.passes[slot])].tolist()
        return Progress(codes, tuple(accepted), self.spent - before)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the seconds of what is inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.spent += took
            self.clock += took / max(1, len(self.seats))
