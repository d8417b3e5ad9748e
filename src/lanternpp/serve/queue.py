"""The queue of a batcher: clients take turns, and within one client it is first come, first served.

Any thread puts pictures into the queue. Places are reserved before a prompt is encoded, so a request that finds the queue
full costs nothing.
"""

from __future__ import annotations

import bisect
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from lanternpp.api.calls import EMPTY
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.guidance import Guidance
from lanternpp.errors import InputError
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.fresh_thread import run_in_fresh_thread
from lanternpp.serve.tickets import Closed, Full, ImageSpec, Ticket
from lanternpp.types import Prompt

RECENT = 0.2  # weight of the latest value in the moving average of the seconds between two finished pictures


class FairQueue:
    """Waiting tickets in the order in which they should start: round robin over clients.

    A new ticket is put into a round: the one after the last round in which its client has a ticket here, and not before
    the round that is being served. So a client with forty tickets and a client with one alternate.
    """

    def __init__(self) -> None:
        # (round, arrival number, ticket), sorted. The list is replaced and never changed in place, so that one thread
        # may iterate over it while another one adds a ticket.
        self._entries: list[tuple[int, int, Ticket]] = []
        self._round = self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Ticket]:
        """The tickets in the order in which they should start, as of now: later changes are not seen."""
        return iter([ticket for *_, ticket in self._entries])

    def add(self, ticket: Ticket) -> None:
        """Put a ticket into the queue."""
        client = ticket.spec.client
        taken = [number for number, _, other in self._entries if other.spec.client == client]
        number = max(self._round, max(taken, default=-1) + 1)
        self._arrivals += 1
        entries = list(self._entries)
        bisect.insort(entries, (number, self._arrivals, ticket))
        self._entries = entries

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out, because its picture starts or because it was cancelled."""
        removed = next(number for number, _, entry in self._entries if entry is ticket)
        self._entries = [entry for entry in self._entries if entry[-1] is not ticket]
        self._round = max(self._round, min((number for number, *_ in self._entries), default=removed))


class Observer(Protocol):
    """Is called when a batcher has done something, in the thread that did it."""

    def stepped(self, pictures: int) -> None:
        """A step advanced so many pictures."""

    def ended(self, ticket: Ticket) -> None:
        """A ticket is settled: finished, failed, cancelled or expired."""


class SubmissionQueue:
    """A queue of at most `config.queue` pictures for one model. A subclass takes them out and draws them."""

    def __init__(self, pipe: Pipeline, config: ServerConfig):
        self.pipe, self.config = pipe, config
        self.observers: list[Observer] = []
        self._waiting = FairQueue()
        self._changed = threading.Condition()  # guards the queue and the flags; wakes the drawing thread
        self._encoding = threading.Lock()  # a target encodes one prompt at a time
        self._reserved = 0  # places in the queue for pictures whose prompts are being encoded
        self.closed = False  # whether nothing new is accepted
        self._seconds_between: float | None = None  # moving average between two finished pictures
        self._last_finish: float | None = None  # time.monotonic(); None: nothing was left to draw after it

    def submit(self, spec: ImageSpec) -> Ticket:
        """Put a picture into the queue. Raises Full where there is no room, Closed, or InputError."""
        return self.submit_all([spec])[0]

    def submit_all(self, specs: Sequence[ImageSpec]) -> list[Ticket]:
        """Put all of these into the queue, or none; raises as `submit`."""
        with self.reserve(len(specs)) as submit:
            return submit(specs)

    @contextmanager
    def reserve(self, count: int) -> Iterator[Callable[[Sequence[ImageSpec]], list[Ticket]]]:
        """Reserve places in the queue while the block runs; gives the function that submits so many pictures.

        Reserving is quick. It raises Full, Closed, or InputError where the queue is shorter than `count`. The function
        encodes the prompts, which may take a second; it raises Closed or InputError.
        """
        room = self.config.queue
        if count > room:
            raise InputError(f"{count} pictures do not fit the queue of {room}; ask for fewer")
        with self._changed:
            self._refuse_closed()
            taken = len(self._waiting) + self._reserved
            if taken + count > room:
                raise Full(taken, self._retry_after(count))
            self._reserved += count
        try:
            yield self._submit
        finally:
            with self._changed:
                self._reserved -= count
                self._changed.notify_all()

    def _submit(self, specs: Sequence[ImageSpec]) -> list[Ticket]:
        """Encode the prompts, each once, and put a ticket for every picture into the queue."""
        tickets = [Ticket(spec, self._wake) for spec in specs]
        encoded: dict[tuple[str, int], Prompt] = {}
        for ticket in tickets:
            key = ticket.spec.prompt, Guidance(ticket.spec.settings.cfg).branches
            ticket.encoded = encoded[key] if key in encoded else encoded.setdefault(key, self._encode(*key))
        with self._changed:
            self._refuse_closed()
            for ticket in tickets:
                self._waiting.add(ticket)
                for observer in self.observers:
                    ticket.when_done(observer.ended)
            self._changed.notify_all()
        return tickets

    def _encode(self, prompt: str, branches: int) -> Prompt:
        """The target's encoding of a prompt, computed outside the drawing thread. Raises InputError."""
        if not prompt.strip():
            raise InputError(EMPTY)
        with self._encoding:
            return run_in_fresh_thread(self._encoded, prompt, branches)

    @torch.inference_mode()
    def _encoded(self, prompt: str, branches: int) -> Prompt:
        return self.pipe.target.prompt([prompt], branches)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise Closed("the server is shutting down")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _retry_after(self, count: int) -> int:
        """Whole seconds, 1 to 60, until the queue probably has room for `count` more pictures."""
        return max(1, min(60, math.ceil(count * (self._seconds_between or 1.0))))

    def _record_finish(self, busy: bool) -> None:
        """A picture was finished: update the average time between two. busy: whether there are more to draw."""
        now = time.monotonic()
        if self._last_finish is not None:
            seconds = now - self._last_finish
            old = self._seconds_between
            self._seconds_between = seconds if old is None else old + RECENT * (seconds - old)
        self._last_finish = now if busy else None
