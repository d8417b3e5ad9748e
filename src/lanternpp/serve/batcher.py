"""Continuous batching: one thread owns the engines, and orders enter and leave between their steps.

`fleet.py` says which lane an order enters and which lane steps next, `line.py` in which order orders start.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.calibration import Calibration, Choose
from lanternpp.serve.fleet import Blocked, Fleet, Held
from lanternpp.serve.intake import Intake
from lanternpp.serve.lanes import Lane
from lanternpp.serve.line import Line
from lanternpp.serve.orders import Cancelled, Closed, Drawn, Expired, Full, Order, Progress, Ticket
from lanternpp.settings import Settings

__all__ = [
    "Batcher",
    "Cancelled",
    "Closed",
    "Drawn",
    "Expired",
    "Full",
    "Order",
    "Progress",
    "Stats",
    "Ticket",
]


@dataclass(frozen=True)
class Stats:
    """What the batcher is doing right now."""

    running: int  # pictures
    queued: int
    lanes: dict[int, int] = field(default_factory=dict)  # rows of the engines kept -> how many of them
    seconds_between: float | None = None  # two finished pictures, lately; None: too early to say


class Batcher(Intake):
    """Takes orders from any thread and draws them in one."""

    def __init__(
        self,
        pipe: Pipeline,
        slots: int = 8,
        queue: int = 64,
        lanes: int = 4,
        choose: Choose | None = None,
        calibration: Calibration | None = None,
    ):
        """slots: most rows of a lane, a power of two; queue: most orders that wait; lanes: most engines kept.

        pipe: best read by way of `aside`. choose: the settings that a lane of so many rows draws with, in place of
        those asked for, with the same guidance. calibration: finds such settings while no order waits.
        Raises InputError where a number is wrong.
        """
        if slots < 1 or slots & (slots - 1):
            raise InputError(f"{slots} slots are no power of two; use 1, 2, 4, 8 ...")
        if lanes < 1:
            raise InputError(f"lanes of {lanes} are below 1; use 1 or more")
        super().__init__(pipe, queue)
        self.slots = slots
        self.calibration = calibration
        chosen = calibration.choose if calibration else choose
        self._choose = chosen or (lambda settings, rows: settings)
        self._fleet = Fleet(self._build, slots, lanes)
        self._stop = False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lanternpp-batcher", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> Exception | None:
        """Why it ended by itself; None: it did not."""
        return self._broken

    @property
    def stats(self) -> Stats:
        """A glance at it."""
        with self._changed:
            lanes = self._fleet.lanes
            rows = Counter(lane.rows for lane in lanes)
            running = sum(len(lane.seats) for lane in lanes)
            return Stats(running, len(self._line), dict(rows), self._between)

    def close(self, drain: bool = True, timeout: float = 30.0) -> bool:
        """Take nothing new; with `drain`, wait up to `timeout` seconds for what was accepted. Then stop.

        Returns whether all of it was finished; what was not raises Closed where its result is waited for.
        """
        until = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            if drain:
                self._changed.wait_for(lambda: not self._busy(), max(0.0, until - time.monotonic()))
            left = self._busy()
            self._stop = True
            self._changed.notify_all()
        self._thread.join()
        return not left

    def _busy(self) -> bool:
        return bool(len(self._line)) or bool(self._fleet.running)

    # What follows runs in the thread that draws.

    def _run(self) -> None:
        reason: Exception = Closed("the server shut down before the picture was finished")
        try:
            while self._turn():
                pass
        except Exception as error:  # not a picture's fault: nobody must wait for ever
            reason = self._broken = error
        finally:
            with self._changed:
                self._closed = self._stop = True
                for ticket in [*self._fleet.tickets, *self._line]:
                    ticket.fail(reason)
                self._line, self._fleet.lanes = Line(), ()
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Let in what finds a slot, and step once; waits for work. False: it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._busy() or self._at_leisure())
            if self._stop:
                return False
            self._expire()
        self._enter()
        if turn := self._fleet.turn():
            self._step(*turn)
        elif calibration := self._at_leisure():
            self._calibrate(calibration)
        with self._changed:
            self._changed.notify_all()  # whoever drains looks again
        return True

    def _at_leisure(self) -> Calibration | None:
        """What can be measured while there is nothing to draw, and nothing on its way."""
        unfinished = self.calibration is not None and not self.calibration.over
        return self.calibration if unfinished and not self._kept and not self._closed else None

    def _calibrate(self, calibration: Calibration) -> None:
        """A step of measuring; once it is over, lanes are built with what was found."""
        if not self._encoding.acquire(timeout=0.1):  # it encodes prompts too
            return
        try:
            calibration.step()
        finally:
            self._encoding.release()
        if calibration.choose is not None:
            self._choose = calibration.choose
            for lane in self._fleet.lanes:
                self._fleet.close(lane)

    def _expire(self) -> None:
        """Settle what is past its deadline, and forget what waits and is settled."""
        now = time.monotonic()
        for ticket in [*self._line, *self._fleet.tickets]:
            limit = ticket.order.deadline
            if limit is not None and now - ticket.submitted > limit:
                ticket.fail(Expired(f"the picture was not finished within {limit:g} s"))
        for ticket in self._line:
            if ticket.done:
                self._line.leave(ticket)
        for lane in self._fleet.running:
            lane.sweep()

    def _step(self, lane: Lane, client: str) -> None:
        """One step of a lane in a client's turn; what breaks takes the lane and its pictures with it."""
        before = lane.spent
        try:
            finished = lane.step()
            for observer in self.observers:
                observer.stepped(len(lane.seats) + len(finished))
            for _ in finished:
                self._account(self._busy())
        except Exception as error:
            self._break(lane, error)
        self._fleet.pay(client, lane.spent - before)
        lane.used = time.monotonic()

    def _break(self, lane: Lane, error: Exception) -> None:
        """A lane failed: its engine may be in any state."""
        lane.fail(error)
        self._fleet.close(lane)

    def _enter(self) -> None:
        """Let in what finds a slot, in the order of the queue."""
        full: set[Settings] = set()
        held: set[str] = set()
        for ticket in self._line:
            key, client = replace(ticket.order.settings, batch_size=1), ticket.order.client
            if key in full or client in held or ticket.done:
                continue
            waiting = sum(replace(other.order.settings, batch_size=1) == key for other in self._line)
            began = time.perf_counter()
            try:
                lane = self._fleet.lane(key, waiting, client)
            except Held:
                held.add(client)
                continue
            except Blocked:
                return
            except Exception as error:  # no such engine can be built
                ticket.fail(error)
            else:
                if lane is None:
                    full.add(key)
                    continue
                self._admit(lane, ticket)
            self._fleet.pay(client, time.perf_counter() - began)
            with self._changed:  # not before it has a seat: whoever drains must see it in one or the other
                self._line.leave(ticket)

    def _admit(self, lane: Lane, ticket: Ticket) -> None:
        """Prefill. A refused prompt fails its own picture alone."""
        ticket.started = time.monotonic()
        try:
            lane.admit(ticket)
        except InputError as error:
            ticket.fail(error)
        except Exception as error:
            self._break(lane, error)
        ticket.encoded = None

    def _build(self, key: Settings, rows: int) -> Lane:
        settings = replace(self._choose(replace(key, batch_size=rows), rows), batch_size=rows)
        return Lane(self.pipe.new_engine(settings), key, settings, self.pipe.images)
