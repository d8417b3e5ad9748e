"""The batcher: one thread owns the engines, and pictures enter and leave between the steps.

`scheduler.py` chooses the next picture, the batch runner that it enters, and the batch runner that steps next.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lanternpp.api.calls import pictures
from lanternpp.api.options import check_prompt
from lanternpp.api.picture import digests
from lanternpp.api.pipeline import Pipeline
from lanternpp.engine.sampling import Guidance
from lanternpp.errors import InputError
from lanternpp.models.base import Target
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.new_thread import run_in_new_thread
from lanternpp.serve.scheduler import AllRunnersBusy, BatchRunner, ClientAtLimit, FairQueue, Scheduler
from lanternpp.serve.tickets import CLOSED, Closed, Full, ImageSpec, Key, Ticket
from lanternpp.types import Prompt

log = logging.getLogger("lanternpp.serve")
UNFINISHED = "the server shut down before the picture was finished"
JOIN_SECONDS = 30.0  # time in which the drawing thread may end
LATEST_WEIGHT = 0.2  # of the latest value in the moving average of the seconds between two finished pictures


@dataclass(frozen=True)
class Load:
    """Numbers of pictures and batch runners at one moment."""

    running: int  # pictures in slots
    queued: int  # pictures in the queue
    runners: Mapping[int, int]  # batch size -> number of batch runners


class Batcher:
    """Accepts pictures of one model from any thread, and draws all of them in one thread, the drawing thread.

    At most `config.queue` pictures wait. Their places are reserved before prompts are encoded, so a full queue encodes none.
    """

    def __init__(self, pipe: Pipeline, config: ServerConfig | None = None):
        """Start the drawing thread. pipe: best read with `run_in_new_thread`."""
        self.pipe, self.config = pipe, config or ServerConfig()
        # Hooks: `stepped` is called with the number of pictures that a step advanced, `ended` with a settled ticket.
        self.stepped: Callable[[int], None] = lambda pictures: None
        self.ended: Callable[[Any], None] = lambda ticket: None
        self._waiting = FairQueue()
        self._changed = threading.Condition()  # guards the queue and the flags; wakes the drawing thread
        self._encoding = threading.Lock()  # a target encodes one prompt at a time
        self._reserved = 0  # places in the queue for pictures whose prompts are being encoded
        self.closed = False  # whether new pictures are rejected
        self._seconds_between: float | None = None  # moving average between two finished pictures
        self._last_finish: float | None = None  # time.monotonic(); None: no picture was left to draw after it
        self._scheduler = Scheduler(self._build, self.config.slots, self.config.max_engines)
        self._stop = False
        self.broken: Exception | None = None  # the error that ended the drawing thread
        self._thread = threading.Thread(target=self._run, name="lanternpp-batcher", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """The present numbers of pictures and batch runners."""
        with self._changed:
            runners = self._scheduler.runners
            running = sum(len(runner.tickets) for runner in runners)
            return Load(
                running, len(self._waiting), Counter(runner.settings.batch_size for runner in runners)
            )

    @contextmanager
    def reserve(self, count: int) -> Iterator[Callable[[Sequence[ImageSpec]], list[Ticket]]]:
        """Reserve `count` places in the queue while the block runs, and yield the function that submits the pictures.

        Reserving is quick. It raises Full, Closed, or InputError where the queue is shorter than `count`. The function
        encodes the prompts, which may take a second; it raises Closed, Expired or InputError.
        """
        capacity = self.config.queue
        if count > capacity:
            raise InputError(f"{count} pictures do not fit the queue of {capacity}; ask for fewer")
        with self._changed:
            self._check_open()
            num_queued = len(self._waiting) + self._reserved
            if num_queued + count > capacity:
                # Until then `count` pictures are finished at the present rate.
                seconds = math.ceil(count * (self._seconds_between or 1.0))
                raise Full(num_queued, retry_after=max(1, min(60, seconds)))
            self._reserved += count
        reserved = count

        def submit(specs: Sequence[ImageSpec]) -> list[Ticket]:
            nonlocal reserved
            tickets = self._encode_all(specs)
            with self._changed:
                self._check_open()
                # A waiting picture must not count as a reserved place too: the next request would find the queue full.
                self._reserved -= reserved
                reserved = 0
                for ticket in tickets:
                    self._waiting.add(ticket)
                    ticket.add_done_callback(self.ended)
                self._changed.notify_all()
            return tickets

        try:
            yield submit
        finally:
            with self._changed:
                self._reserved -= reserved

    def _encode_all(self, specs: Sequence[ImageSpec]) -> list[Ticket]:
        """Return a ticket with its encoded prompt for every picture; equal prompts are encoded once. Raises Expired, InputError."""
        tickets = [Ticket(spec, self._wake) for spec in specs]
        encodings: dict[Any, tuple[str, Target, Prompt]] = {}
        for ticket in tickets:
            spec = ticket.spec
            branches = Guidance(spec.settings.cfg).branches
            key = spec.prompt, spec.files, branches
            if expired := ticket.expired:  # while earlier prompts were encoded
                raise expired
            if key not in encodings:
                check_prompt(spec.prompt)
                with self._encoding:
                    encodings[key] = run_in_new_thread(self._encode, spec, branches)
            prompt, ticket.target, ticket.encoded = encodings[key]
            ticket.spec = replace(spec, prompt=prompt, files=())
        return tickets

    @torch.inference_mode()
    def _encode(self, spec: ImageSpec, branches: int) -> tuple[str, Target, Prompt]:
        """Return the prompt with the pictures that it shows, the target that draws it, and its encoding."""
        target = self.pipe.target
        if not spec.files:
            return spec.prompt, target, target.prompt([spec.prompt], branches)
        images = pictures(spec.files)
        prompt = target.depicted(spec.prompt, images, spec.own_shape)
        prompt.digests = digests(images)
        target = target.shaped(prompt.shape)
        return prompt, target, target.prompt([prompt], branches)

    def _check_open(self) -> None:
        if self.closed:
            raise Closed(CLOSED)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _record_finish(self) -> None:
        """Update the average time between two finished pictures, now that a picture is finished."""
        now = time.monotonic()
        if self._last_finish is not None:
            seconds = now - self._last_finish
            average = seconds if self._seconds_between is None else self._seconds_between
            self._seconds_between = average + LATEST_WEIGHT * (seconds - average)
        self._last_finish = now if self._busy() else None

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Accept no new pictures; with `drain`, wait up to `timeout` seconds for the accepted ones. Then stop drawing.

        Returns whether all accepted pictures were finished. The tickets of unfinished pictures fail with Closed, also where a
        step takes longer than `JOIN_SECONDS`: the drawing thread then ends with the process.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self.closed = True
            if drain:
                self._changed.wait_for(lambda: not self._busy(), max(0.0, deadline - time.monotonic()))
            all_finished = not self._busy()
            self._stop = True
            self._changed.notify_all()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            message = "a step has taken %g s since drawing was to stop, and is waited for no longer"
            log.warning(message, JOIN_SECONDS)
            self._fail_all(Closed(UNFINISHED))
        return all_finished

    def _busy(self) -> bool:
        # A ticket stays an entry of the queue during its prefill, which the length of the queue does not count.
        return bool(list(self._waiting) or self._scheduler.running)

    def _fail_all(self, error: Exception) -> None:
        """Settle every ticket that is not settled with this error."""
        for ticket in [*self._scheduler.tickets, *self._waiting]:
            ticket.settle(error)

    # The methods below run in the drawing thread.

    def _run(self) -> None:
        outcome: Exception = Closed(UNFINISHED)
        try:
            while self._iterate():
                pass
        except Exception as error:
            # A bug or a broken device: every ticket fails now, since nobody would settle it later.
            outcome = self.broken = error
        finally:
            with self._changed:
                self.closed = self._stop = True
                self._fail_all(outcome)
                self._waiting, self._scheduler.runners = FairQueue(), ()
                self._changed.notify_all()

    def _iterate(self) -> bool:
        """Wait for work, fill free slots from the queue, and step once. Return False when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._busy())
            if self._stop:
                return False
            self._expire()
        self._fill_slots()
        if next_step := self._scheduler.next_step():
            self._step(*next_step)
        self._wake()  # `close` may be waiting for the last picture
        return True

    def _expire(self) -> None:
        """Fail the tickets that are past their deadline; remove settled ones from the queue and the slots."""
        for ticket in [*self._waiting, *self._scheduler.tickets]:
            if expired := ticket.expired:
                ticket.settle(expired)
        for ticket in self._waiting:
            if ticket.done():
                self._waiting.remove(ticket)
        for runner in self._scheduler.running:
            runner.sweep()

    def _step(self, runner: BatchRunner, client: str) -> None:
        """Run one step of a batch runner and charge it to a client. An error fails all pictures in this batch runner alone."""
        busy_before = runner.busy_seconds
        try:
            num_finished = runner.step()
            self.stepped(len(runner.tickets) + num_finished)
            for _ in range(num_finished):
                self._record_finish()
        except Exception as error:
            self._discard(runner, error)
        self._scheduler.charge(client, runner.busy_seconds - busy_before)
        runner.last_used = time.monotonic()

    def _discard(self, runner: BatchRunner, error: Exception) -> None:
        """Close a batch runner whose engine raised an error and may be in any state; its tickets fail with the error."""
        for ticket in runner.tickets:
            ticket.settle(error)
        self._scheduler.close(runner)

    def _fill_slots(self) -> None:
        """Move tickets from the queue into free slots, in the order of the queue."""
        full: set[Key] = set()
        at_limit: set[str] = set()
        for ticket in self._waiting:
            key, client = ticket.spec.key, ticket.spec.client
            if key in full or client in at_limit or ticket.done():
                continue
            num_waiting = sum(waiting.spec.key == key for waiting in self._waiting)
            start = time.perf_counter()
            try:
                runner = self._scheduler.runner_for(key, num_waiting, client)
            except ClientAtLimit:
                at_limit.add(client)
                continue
            except AllRunnersBusy:
                return
            except Exception as error:  # the engine could not be built
                ticket.settle(error)
            else:
                if runner is None:
                    full.add(key)
                    continue
                self._admit(runner, ticket)
            self._scheduler.charge(client, time.perf_counter() - start)
            # The ticket leaves the queue after it has a slot: `close` must find it in the queue or in a slot at any time.
            with self._changed:
                self._waiting.remove(ticket)

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
