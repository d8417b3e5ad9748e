"""The batcher: one thread owns the engines, and pictures enter and leave between the steps.

`scheduler.py` chooses the next picture, the batch runner that it enters, and the batch runner that steps next.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from starlette.exceptions import HTTPException

from lanternpp.api.calls import pictures
from lanternpp.api.picture import digests
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError, counted
from lanternpp.models.base import Target
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.metrics import Metrics
from lanternpp.serve.new_thread import run_in_new_thread
from lanternpp.serve.scheduler import BatchRunner, MustWait, Scheduler, with_ticket
from lanternpp.serve.tickets import FULL, Key, Ticket, closed
from lanternpp.types import Prompt

log = logging.getLogger("lanternpp.serve")
UNFINISHED = "the server shut down before the picture was finished"
JOIN_SECONDS = 30.0  # time in which the drawing thread may end


class Batcher:
    """Accepts pictures of one model from any thread, and draws all of them in one thread, the drawing thread.

    A request passes `accept`, which is quick and gives its pictures places in the queue, then `encode`. So a full queue encodes no
    prompt. At most `config.queue` pictures wait.
    """

    def __init__(self, pipe: Pipeline, config: ServerConfig | None = None):
        """Start the drawing thread. pipe: best read with `run_in_new_thread`."""
        self.pipe, self.config = pipe, config or ServerConfig()
        self._changed = threading.Condition()  # guards the tickets and the flags; wakes the drawing thread
        # The accepted pictures that are not settled, in the order in which they should start. The tuple is replaced and never
        # changed in place, so that one thread may iterate over it while another thread adds a ticket.
        self._tickets: tuple[Ticket, ...] = ()
        self.closed = False  # whether new pictures are rejected
        self._all_finished = True  # False once `close` has given pictures up
        self._seconds_between = 1.0  # seconds between two finished pictures
        self._scheduler = Scheduler(self._build, self.config.slots, self.config.max_engines)
        self._stop = False
        self.broken: Exception | None = None  # the error that ended the drawing thread
        self.metrics = Metrics(
            self.config, lambda: self.queued, lambda: self.running, self._scheduler.count_runners
        )
        self._thread = threading.Thread(target=self._run, name="lanternpp-batcher", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """The present number of pictures in slots."""
        return len(self._scheduler.tickets)

    @property
    def queued(self) -> int:
        """The present number of pictures in the queue; a picture whose prefill has begun has left it."""
        return sum(ticket.started is None for ticket in self._tickets)

    @property
    def _ready(self) -> list[Ticket]:
        """The waiting pictures whose prompts are encoded, in the order in which they should start."""
        return [ticket for ticket in self._tickets if ticket.encoded is not None]

    def accept(self, tickets: Sequence[Ticket]) -> None:
        """Put the pictures of a request into the queue, all or none.

        Raises an HTTPException where the queue is full or closed, or InputError where it is shorter than the request.
        """
        count, capacity = len(tickets), self.config.queue
        if count > capacity:
            raise InputError(f"{count} pictures do not fit the queue of {capacity}; ask for fewer")
        with self._changed:
            if self.closed:
                raise closed()
            if self.queued + count > capacity:
                # Until then `count` pictures are finished at the present rate.
                seconds = max(1, min(60, math.ceil(count * self._seconds_between)))
                message = f"the queue has {counted(self.queued, 'picture')} already; try again in {seconds} s"
                raise HTTPException(FULL, message, {"Retry-After": str(seconds)})
            for ticket in tickets:
                self._tickets = with_ticket(self._tickets, ticket)
                ticket.add_done_callback(self._settled)

    def encode(self, tickets: Sequence[Ticket]) -> None:
        """Encode the prompt of a request, which may take a second; then its pictures are drawn.

        One thread at a time may encode. Raises InputError, or an HTTPException where the deadline has passed; the tickets are then
        settled with this error.
        """
        try:
            if expired := tickets[0].expired:
                raise expired
            prompt, target, encoded = run_in_new_thread(self._encode, tickets[0])
        except Exception as error:
            for ticket in tickets:
                ticket.settle(error)
            raise
        with self._changed:
            for ticket in tickets:
                ticket.prompt, ticket.files, ticket.target, ticket.encoded = prompt, (), target, encoded
            self._changed.notify_all()

    @torch.inference_mode()
    def _encode(self, ticket: Ticket) -> tuple[str, Target, Prompt]:
        """Return the prompt with the pictures that it shows, the target that draws it, and its encoding."""
        target, branches = self.pipe.target, Guidance(ticket.settings.cfg).branches
        if not ticket.files:
            return ticket.prompt, target, target.prompt([ticket.prompt], branches)
        images = pictures(ticket.files)
        prompt = target.depicted(ticket.prompt, images, ticket.own_shape)
        prompt.digests = digests(images)
        target = target.shaped(prompt.shape)
        return prompt, target, target.prompt([prompt], branches)

    def _settled(self, ticket: Any) -> None:
        """Forget a ticket that has just been settled, in any thread."""
        with self._changed:
            self._tickets = tuple(other for other in self._tickets if other is not ticket)
            if ticket.exception() is None:
                # By Little's law: the seconds that a picture is drawn, over the number of pictures that are drawn.
                self._seconds_between = (time.monotonic() - ticket.started) / (1 + self.running)
            self._changed.notify_all()
        self.metrics.ended(ticket)

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Accept no new pictures; with `drain`, wait up to `timeout` seconds for the accepted ones. Then stop drawing.

        Returns whether all accepted pictures were finished. The tickets of unfinished pictures fail with status 503, also where a
        step takes longer than `JOIN_SECONDS`: the drawing thread then ends with the process.
        """
        with self._changed:
            self.closed = True
            if drain:
                self._changed.wait_for(lambda: not self._tickets, timeout)
            self._all_finished = self._all_finished and not self._tickets
            self._stop = True
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            message = "a step has taken %g s since drawing was to stop, and is waited for no longer"
            log.warning(message, JOIN_SECONDS)
            self._fail(self._tickets, closed(UNFINISHED))
        return self._all_finished

    @staticmethod
    def _fail(tickets: Iterable[Ticket], error: Exception) -> None:
        """Settle these tickets with an error, except those that are settled."""
        for ticket in tickets:
            ticket.settle(error)

    # The methods below run in the drawing thread.

    def _run(self) -> None:
        outcome: Exception = closed(UNFINISHED)
        try:
            while self._iterate():
                pass
        except Exception as error:
            # A bug or a broken device: every ticket fails now, since nobody would settle it later.
            outcome = self.broken = error
        finally:
            with self._changed:
                self.closed = self._stop = True
                self._fail(self._tickets, outcome)
                self._scheduler.runners = ()

    def _iterate(self) -> bool:
        """Wait for work, fill free slots from the queue, and step once. Return False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._ready or self._scheduler.running)
            if self._stop:
                return False
            self._expire()
        self._fill_slots()
        if next_step := self._scheduler.next_step():
            self._step(*next_step)
        return True

    def _expire(self) -> None:
        """Fail the tickets that are past their deadline; free the slots of settled ones."""
        for ticket in self._tickets:
            if expired := ticket.expired:
                ticket.settle(expired)
        for runner in self._scheduler.running:
            runner.sweep()

    def _step(self, runner: BatchRunner, client: str) -> None:
        """Run one step of a batch runner and charge it to a client. An error fails all pictures in this batch runner alone."""
        busy_before = runner.busy_seconds
        self.metrics.batch.observe(len(runner.tickets))
        try:
            runner.step()
        except Exception as error:
            self._discard(runner, error)
        self._scheduler.charge(client, runner.busy_seconds - busy_before)

    def _discard(self, runner: BatchRunner, error: Exception) -> None:
        """Close a batch runner whose engine raised an error and may be in any state; its tickets fail with the error."""
        self._fail(runner.tickets, error)
        self._scheduler.close(runner)

    def _fill_slots(self) -> None:
        """Move tickets from the queue into free slots, in the order of the queue."""
        blocked: set[Key | str] = set()  # keys and clients whose pictures wait
        for ticket in self._ready:
            key, client = ticket.key, ticket.client
            if key in blocked or client in blocked or ticket.done():
                continue
            # At least this picture, which another thread may cancel meanwhile.
            num_waiting = max(sum(waiting.key == key for waiting in self._ready), 1)
            start = time.perf_counter()
            try:
                self._admit(self._scheduler.runner_for(key, num_waiting, client), ticket)
            except MustWait as wait:
                if wait.whom is None:
                    return
                blocked.add(wait.whom)
                continue
            except Exception as error:  # the engine could not be built
                ticket.settle(error)
            self._scheduler.charge(client, time.perf_counter() - start)

    def _admit(self, runner: BatchRunner, ticket: Ticket) -> None:
        """Prefill a picture. Where the target rejects its prompt, this picture alone fails."""
        ticket.started = time.monotonic()
        try:
            runner.admit(ticket)
        except Exception as error:
            ticket.settle(error)
            if not isinstance(error, InputError):
                self._discard(runner, error)
        ticket.encoded = None

    def _build(self, key: Key, size: int) -> BatchRunner:
        settings, shape = key
        settings = self.pipe.at_batch(settings, size)
        engine = self.pipe.new_engine(settings, shape)
        return BatchRunner(engine, key, settings, partial(self.pipe.images, target=engine.target))
