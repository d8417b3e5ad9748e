"""The batcher: one thread owns the engines, and pictures enter and leave between the steps.

`scheduler.py` says which batch runner a picture enters and which one steps next, `queue.py` which picture is next.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lanternpp.api.options import Settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.errors import InputError
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.queue import FairQueue, SubmissionQueue
from lanternpp.serve.scheduler import AllRunnersBusy, BatchRunner, ClientAtLimit, Scheduler
from lanternpp.serve.tickets import Closed, Expired, Ticket


@dataclass(frozen=True)
class Load:
    """What the batcher is doing right now."""

    running: int  # pictures in slots
    queued: int  # pictures in the queue
    runners: Mapping[int, int]  # batch size -> number of batch runners


class Batcher(SubmissionQueue):
    """Accepts pictures from any thread and draws them in one, the drawing thread."""

    def __init__(self, pipe: Pipeline, config: ServerConfig | None = None):
        """Start the drawing thread. pipe: best read with `run_in_fresh_thread`."""
        super().__init__(pipe, config or ServerConfig())
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

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Accept nothing new; with `drain`, wait up to `timeout` seconds for the accepted pictures. Then stop.

        Returns whether all of them were finished. The tickets of the others fail with Closed.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self.closed = True
            if drain:
                self._changed.wait_for(lambda: not self._busy(), max(0.0, until - time.monotonic()))
            unfinished = self._busy()
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        return not unfinished

    def _busy(self) -> bool:
        return bool(len(self._waiting)) or bool(self._scheduler.running)

    # The methods below run in the drawing thread.

    def _run(self) -> None:
        reason: Exception = Closed("the server shut down before the picture was finished")
        try:
            while self._iterate():
                pass
        except Exception as error:
            # A bug or a broken device: let every ticket fail instead of waiting for ever.
            reason = self.broken = error
        finally:
            with self._changed:
                self.closed = self._stop = True
                for ticket in [*self._scheduler.tickets, *self._waiting]:
                    ticket.fail(reason)
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
        now = time.monotonic()
        for ticket in [*self._waiting, *self._scheduler.tickets]:
            limit = ticket.spec.deadline
            if limit is not None and now - ticket.submitted > limit:
                ticket.fail(Expired(f"the picture was not finished within {limit:g} s"))
        for ticket in self._waiting:
            if ticket.done:
                self._waiting.remove(ticket)
        for runner in self._scheduler.running:
            runner.sweep()

    def _step(self, runner: BatchRunner, client: str) -> None:
        """One step of a batch runner, charged to a client. An error fails all pictures in the batch runner, no others."""
        before = runner.busy_seconds
        try:
            finished = runner.step()
            for observer in self.observers:
                observer.stepped(len(runner.tickets) + finished)
            for _ in range(finished):
                self._record_finish(self._busy())
        except Exception as error:
            self._discard(runner, error)
        self._scheduler.charge(client, runner.busy_seconds - before)
        runner.last_used = time.monotonic()

    def _discard(self, runner: BatchRunner, error: Exception) -> None:
        """Close a batch runner whose engine raised: it may be in any state."""
        for ticket in runner.tickets:
            ticket.fail(error)
        self._scheduler.close(runner)

    def _fill_slots(self) -> None:
        """Move tickets from the queue into free slots, in the order of the queue."""
        full: set[Settings] = set()
        at_limit: set[str] = set()
        for ticket in self._waiting:
            key, client = replace(ticket.spec.settings, batch_size=1), ticket.spec.client
            if key in full or client in at_limit or ticket.done:
                continue
            waiting = sum(replace(other.spec.settings, batch_size=1) == key for other in self._waiting)
            began = time.perf_counter()
            try:
                runner = self._scheduler.runner_for(key, waiting, client)
            except ClientAtLimit:
                at_limit.add(client)
                continue
            except AllRunnersBusy:
                return
            except Exception as error:  # the engine could not be built
                ticket.fail(error)
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
            ticket.fail(error)
            if not isinstance(error, InputError):
                self._discard(runner, error)
        ticket.encoded = None

    def _build(self, key: Settings, size: int) -> BatchRunner:
        settings = replace(self.pipe.at_batch(replace(key, batch_size=size), size), batch_size=size)
        return BatchRunner(self.pipe.new_engine(settings), key, settings, self.pipe.images)
