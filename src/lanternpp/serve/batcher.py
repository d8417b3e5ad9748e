"""The batcher: one thread owns the engines, and pictures enter and leave between the steps.

`scheduler.py` says which picture is next, which batch runner it enters, and which one steps next.
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
JOIN = 30.0  # seconds that the drawing thread may take to end
RECENT = 0.2  # weight of the latest value in the moving average of the seconds between two finished pictures


@dataclass(frozen=True)
class Load:
    """What the batcher is doing right now."""

    running: int  # pictures in slots
    queued: int  # pictures in the queue
    runners: Mapping[int, int]  # batch size -> number of batch runners


class Batcher:
    """Accepts pictures of one model from any thread, at most `config.queue` at a time, and draws them in one, the drawing thread.

    Places in the queue are reserved before a prompt is encoded, so a request that finds it full costs nothing.
    """

    def __init__(self, pipe: Pipeline, config: ServerConfig | None = None):
        """Start the drawing thread. pipe: best read with `run_in_new_thread`."""
        self.pipe, self.config = pipe, config or ServerConfig()
        # Called in the thread that did it: a step advanced so many pictures; a ticket is settled.
        self.stepped: Callable[[int], None] = lambda pictures: None
        self.ended: Callable[[Any], None] = lambda ticket: None
        self._waiting = FairQueue()
        self._changed = threading.Condition()  # guards the queue and the flags; wakes the drawing thread
        self._encoding = threading.Lock()  # a target encodes one prompt at a time
        self._reserved = 0  # places in the queue for pictures whose prompts are being encoded
        self.closed = False  # whether nothing new is accepted
        self._seconds_between: float | None = None  # moving average between two finished pictures
        self._last_finish: float | None = None  # time.monotonic(); None: nothing was left to draw after it
        self._scheduler = Scheduler(self._build, self.config.slots, self.config.max_engines)
        self._stop = False
        self.broken: Exception | None = None  # the error that ended the drawing thread
        self._thread = threading.Thread(target=self._run, name="lanternpp-batcher", daemon=True)
        self._thread.start()

    @property
    def load(self) -> Load:
        """What it is doing now."""
        with self._changed:
            runners = self._scheduler.runners
            running = sum(len(runner.tickets) for runner in runners)
            return Load(
                running, len(self._waiting), Counter(runner.settings.batch_size for runner in runners)
            )

    @contextmanager
    def reserve(self, count: int) -> Iterator[Callable[[Sequence[ImageSpec]], list[Ticket]]]:
        """Reserve places in the queue while the block runs; gives the function that submits so many pictures.

        Reserving is quick. It raises Full, Closed, or InputError where the queue is shorter than `count`. The function
        encodes the prompts, which may take a second; it raises Closed, Expired or InputError.
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
        reserved = count

        def submit(specs: Sequence[ImageSpec]) -> list[Ticket]:
            nonlocal reserved
            tickets = self._encode_all(specs)
            with self._changed:
                self._refuse_closed()
                # A picture that waits must not count as reserved too: the next request would find the queue full.
                self._reserved, reserved = self._reserved - reserved, 0
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
        """A ticket for every picture, its prompt encoded outside the drawing thread; equal prompts are encoded once. Raises InputError."""
        tickets = [Ticket(spec, self._wake) for spec in specs]
        encoded: dict[Any, tuple[str, Target, Prompt]] = {}
        for ticket in tickets:
            spec, branches = ticket.spec, Guidance(ticket.spec.settings.cfg).branches
            key = spec.prompt, spec.files, branches
            if late := ticket.expired:  # while other prompts were encoded
                raise late
            if key not in encoded:
                check_prompt(spec.prompt)
                with self._encoding:
                    encoded[key] = run_in_new_thread(self._encode, spec, branches)
            prompt, ticket.target, ticket.encoded = encoded[key]
            ticket.spec = replace(spec, prompt=prompt, files=())
        return tickets

    @torch.inference_mode()
    def _encode(self, spec: ImageSpec, branches: int) -> tuple[str, Target, Prompt]:
        """A prompt with its pictures, the target that draws it, and its encoding."""
        target = self.pipe.target
        if not spec.files:
            return spec.prompt, target, target.prompt([spec.prompt], branches)
        shown = pictures(spec.files)
        prompt = target.depicted(spec.prompt, shown, spec.own_shape)
        prompt.digests, target = digests(shown), target.shaped(prompt.shape)
        return prompt, target, target.prompt([prompt], branches)

    def _refuse_closed(self) -> None:
        if self.closed:
            raise Closed(CLOSED)

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

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Accept nothing new; with `drain`, wait up to `timeout` seconds for the accepted pictures. Then stop.

        Returns whether all of them were finished. The tickets of the others fail with Closed, also where a step takes longer than
        `JOIN` seconds: the drawing thread then ends with the process.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self.closed = True
            if drain:
                self._changed.wait_for(lambda: not self._busy(), max(0.0, until - time.monotonic()))
            unfinished = self._busy()
            self._stop = True
            self._changed.notify_all()
        self._thread.join(JOIN)
        if self._thread.is_alive():
            log.warning("a step has taken %g s since drawing was to stop, and is waited for no longer", JOIN)
            self._fail(Closed(UNFINISHED))
        return not unfinished

    def _busy(self) -> bool:
        return bool(list(self._waiting) or self._scheduler.running)

    def _fail(self, reason: Exception) -> None:
        """Fail every ticket that is not settled."""
        for ticket in [*self._scheduler.tickets, *self._waiting]:
            ticket.settle(reason)

    # The methods below run in the drawing thread.

    def _run(self) -> None:
        reason: Exception = Closed(UNFINISHED)
        try:
            while self._iterate():
                pass
        except Exception as error:
            # A bug or a broken device: let every ticket fail instead of waiting for ever.
            reason = self.broken = error
        finally:
            with self._changed:
                self.closed = self._stop = True
                self._fail(reason)
                self._waiting, self._scheduler.runners = FairQueue(), ()
                self._changed.notify_all()

    def _iterate(self) -> bool:
        """Wait for work, fill free slots from the queue, and step once. False: it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._busy())
            if self._stop:
                return False
            self._expire()
        self._fill_slots()
        if next_step := self._scheduler.next_step():
            self._step(*next_step)
        with self._changed:
            self._changed.notify_all()  # `close` may be waiting for the last picture
        return True

    def _expire(self) -> None:
        """Fail the tickets that are past their deadline; remove settled ones from the queue and the slots."""
        for ticket in [*self._waiting, *self._scheduler.tickets]:
            if late := ticket.expired:
                ticket.settle(late)
        for ticket in self._waiting:
            if ticket.done():
                self._waiting.remove(ticket)
        for runner in self._scheduler.running:
            runner.sweep()

    def _step(self, runner: BatchRunner, client: str) -> None:
        """One step of a batch runner, charged to a client. An error fails all pictures in the batch runner, no others."""
        before = runner.busy_seconds
        try:
            finished = runner.step()
            self.stepped(len(runner.tickets) + finished)
            for _ in range(finished):
                self._record_finish(self._busy())
        except Exception as error:
            self._discard(runner, error)
        self._scheduler.charge(client, runner.busy_seconds - before)
        runner.last_used = time.monotonic()

    def _discard(self, runner: BatchRunner, error: Exception) -> None:
        """Close a batch runner whose engine raised: it may be in any state."""
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
            waiting = sum(other.spec.key == key for other in self._waiting)
            began = time.perf_counter()
            try:
                runner = self._scheduler.runner_for(key, waiting, client)
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
            self._scheduler.charge(client, time.perf_counter() - began)
            # Only now, after it has a slot: `close` must find the ticket in the queue or in a slot at any time.
            with self._changed:
                self._waiting.remove(ticket)

    def _admit(self, runner: BatchRunner, ticket: Ticket) -> None:
        """Prefill a picture. A prompt that the target refuses fails this picture alone."""
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
