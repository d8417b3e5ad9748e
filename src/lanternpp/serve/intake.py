"""The queue of a batcher: how an order gets into it, from any thread. Who has no place there costs nothing."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from lanternpp.arguments import EMPTY
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.aside import aside
from lanternpp.serve.line import Line
from lanternpp.serve.orders import Closed, Full, Order, Ticket
from lanternpp.types import Prompt

RECENT = 0.2  # weight of the latest picture in the average time between two


class Observer(Protocol):
    """Who wants to know what a batcher does; told in the thread in which it happens."""

    def stepped(self, pictures: int) -> None:
        """A step advanced so many pictures."""

    def ended(self, ticket: Ticket) -> None:
        """A ticket is settled, one way or another."""


class Intake:
    """A queue of so many orders for a model; what draws is a subclass, which takes them out."""

    def __init__(self, pipe: Pipeline, queue: int):
        if queue < 1:
            raise InputError(f"a queue of {queue} is below 1; use 1 or more")
        self.pipe, self.queue = pipe, queue
        self.observers: list[Observer] = []
        self._line = Line()
        self._changed = threading.Condition()  # guards the line and the flags; wakes the thread that draws
        self._encoding = threading.Lock()  # a target reads one prompt at a time
        self._kept = 0  # places in the queue for orders whose prompts are being encoded
        self._closed = False
        self._between: float | None = None  # seconds between two finished pictures, lately
        self._last: float | None = None  # when a picture was finished with others behind it

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""
        return self._closed

    def submit(self, order: Order) -> Ticket:
        """Put an order into the queue. Raises Full where that has no room, Closed, or InputError."""
        return self.submit_all([order])[0]

    def submit_all(self, orders: Sequence[Order]) -> list[Ticket]:
        """Put all of these into the queue, or none; raises as `submit`."""
        with self.places(len(orders)) as enter:
            return enter(orders)

    @contextmanager
    def places(self, count: int) -> Iterator[Callable[[Sequence[Order]], list[Ticket]]]:
        """Places in the queue, kept while the block runs, and what puts so many orders there.

        Entering is quick; raises Full, Closed, or InputError where the queue is too short. Putting orders there encodes
        their prompts, which may take a second, and raises Closed or InputError.
        """
        if count > self.queue:
            raise InputError(f"{count} pictures do not fit the queue of {self.queue}; ask for fewer")
        with self._changed:
            self._refuse_closed()
            taken = len(self._line) + self._kept
            if taken + count > self.queue:
                raise Full(taken, self._patience(count))
            self._kept += count
        try:
            yield self._submit
        finally:
            with self._changed:
                self._kept -= count
                self._changed.notify_all()

    def _submit(self, orders: Sequence[Order]) -> list[Ticket]:
        """Orders whose places are kept become tickets that wait."""
        tickets = [Ticket(order, self._wake) for order in orders]
        encoded: dict[tuple[str, int], Prompt] = {}
        for ticket in tickets:
            key = ticket.order.prompt, Guidance(ticket.order.settings.cfg).branches
            ticket.encoded = encoded[key] if key in encoded else encoded.setdefault(key, self._encode(*key))
        with self._changed:
            self._refuse_closed()
            for ticket in tickets:
                self._line.join(ticket)
                for observer in self.observers:
                    ticket.when_done(observer.ended)
            self._changed.notify_all()
        return tickets

    def _encode(self, prompt: str, branches: int) -> Prompt:
        """What the target makes of a prompt. The thread that draws never waits for this."""
        if not prompt.strip():
            raise InputError(EMPTY)
        with self._encoding:
            return aside(self._encoded, prompt, branches)

    @torch.inference_mode()
    def _encoded(self, prompt: str, branches: int) -> Prompt:
        return self.pipe.target.prompt([prompt], branches)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Closed("the server is shutting down")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _patience(self, count: int) -> int:
        """Whole seconds until `count` orders more probably find room in the queue."""
        return max(1, min(60, math.ceil(count * (self._between or 1.0))))

    def _account(self, busy: bool) -> None:
        """A picture was finished: how long since the last one, if there was work all along."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            old = self._between
            self._between = took if old is None else old + RECENT * (took - old)
        self._last = now if busy else None
