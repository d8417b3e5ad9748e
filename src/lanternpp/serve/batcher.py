"""Continuous batching: one thread owns the engines, and orders enter and leave between their steps.

`fleet.py` says which lane an order enters and which lane steps next, `line.py` in which order orders start.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.aside import aside
from lanternpp.serve.fleet import Blocked, Fleet
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

Choose = Callable[[Settings, int], Settings]
RECENT = 0.2  # weight of the latest picture in the average time between two


@dataclass(frozen=True)
class Stats:
    """What the batcher is doing right now."""

    running: int  # pictures
    queued: int
    lanes: dict[int, int] = field(
        default_factory=dict
    )  # rows of the engines that are kept -> how many of them
    seconds_between: float | None = None  # two finished pictures, lately; None: too early to say


class Observer(Protocol):
    """Who wants to know what a batcher does; told in the thread in which it happens."""

    def stepped(self, pictures: int) -> None:
        """A step advanced so many pictures."""

    def ended(self, ticket: Ticket) -> None:
        """A ticket is settled, one way or another."""


class Batcher:
    """Takes orders from any thread and draws them in one."""

    def __init__(
        self,
        pipe: Pipeline,
        slots: int = 8,
        queue: int = 64,
        lanes: int = 4,
        choose: Choose | None = None,
    ):
        """slots: most rows of a lane, a power of two; queue: most orders that wait; lanes: most engines kept.

        pipe: best read by way of `aside`. choose: the settings that a lane of so many rows draws with, in place of
        those asked for.
        Raises InputError where a number is wrong.
        """
        if slots < 1 or slots & (slots - 1):
            raise InputError(f"{slots} slots are no power of two; use 1, 2, 4, 8 ...")
        for name, value in (("a queue", queue), ("lanes", lanes)):
            if value < 1:
                raise InputError(f"{name} of {value} is below 1; use 1 or more")
        self.pipe, self.slots, self.queue = pipe, slots, queue
        self._choose = choose or (lambda settings, rows: settings)
        self.observers: list[Observer] = []
        self._line, self._fleet = Line(), Fleet(self._build, slots, lanes)
        self._changed = threading.Condition()  # guards the line and the flags; wakes the thread
        self._asking = threading.Lock()  # a target reads one prompt at a time
        self._closed = self._stop = False
        self._broken: Exception | None = None
        self._between: float | None = None
        self._last: float | None = None  # when a picture was finished with others behind it
        self._thread = threading.Thread(target=self._run, name="lanternpp-batcher", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""
        return self._closed

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

    def check(self, prompt: str) -> None:
        """InputError where the target cannot follow a prompt."""
        if not prompt.strip():
            raise InputError('the prompt is empty; say what to draw, such as "a photo of a red tulip"')
        with self._asking:
            aside(self.pipe.target.prompt, [prompt], 1)

    def submit(self, order: Order) -> Ticket:
        """Put an order into the queue. Raises Full where that has no room, Closed, or InputError."""
        return self.submit_all([order])[0]

    def submit_all(self, orders: Sequence[Order]) -> list[Ticket]:
        """Put all of these into the queue, or none; raises as `submit`."""
        if len(orders) > self.queue:
            raise InputError(f"{len(orders)} pictures do not fit the queue of {self.queue}; ask for fewer")
        for prompt in dict.fromkeys(order.prompt for order in orders):
            self.check(prompt)
        tickets = [Ticket(order, self._wake) for order in orders]
        with self._changed:
            if self._closed:
                raise Closed("the server is shutting down")
            if len(self._line) + len(tickets) > self.queue:
                raise Full(len(self._line), self._patience(len(tickets)))
            for ticket in tickets:
                self._line.join(ticket)
                for observer in self.observers:
                    ticket.when_done(observer.ended)
            self._changed.notify_all()
        return tickets

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

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _patience(self, count: int) -> int:
        """Whole seconds until `count` orders more probably find room in the queue."""
        return max(1, min(60, math.ceil(count * (self._between or 1.0))))

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
            self._changed.wait_for(lambda: self._stop or self._busy())
            if self._stop:
                return False
            self._expire()
        self._enter()
        if running := self._fleet.running:
            self._step(running[0])
        with self._changed:
            self._changed.notify_all()  # whoever drains looks again
        return True

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

    def _step(self, lane: Lane) -> None:
        """One step of a lane; what breaks takes the lane and its pictures with it."""
        try:
            finished = lane.step()
            for observer in self.observers:
                observer.stepped(len(lane.seats) + len(finished))
            for _ in finished:
                self._account()
        except Exception as error:
            self._break(lane, error)
        lane.used = time.monotonic()

    def _break(self, lane: Lane, error: Exception) -> None:
        """A lane failed: its engine may be in any state."""
        lane.fail(error)
        self._fleet.close(lane)

    def _account(self) -> None:
        """A picture was finished: how long since the last one, if there was work all along."""
        now = time.monotonic()
        if self._last is not None:
            took = now - self._last
            old = self._between
            self._between = took if old is None else old + RECENT * (took - old)
        self._last = now if self._busy() else None

    def _enter(self) -> None:
        """Let in what finds a slot, in the order of the queue."""
        full: set[Settings] = set()
        for ticket in self._line:
            key = replace(ticket.order.settings, batch_size=1)
            if key in full or ticket.done:
                continue
            waiting = sum(replace(other.order.settings, batch_size=1) == key for other in self._line)
            try:
                lane = self._fleet.lane(key, waiting)
            except Blocked:
                return
            except Exception as error:  # no such engine can be built
                ticket.fail(error)
            else:
                if lane is None:
                    full.add(key)
                    continue
                self._admit(lane, ticket)
            with self._changed:  # not before it has a seat: whoever drains must see it in one or the other
                self._line.leave(ticket)

    def _admit(self, lane: Lane, ticket: Ticket) -> None:
        """Prefill. A refused prompt fails its own picture alone."""
        ticket.started = time.monotonic()
        try:
            with self._asking:
                lane.admit(ticket)
        except InputError as error:
            ticket.fail(error)
        except Exception as error:
            self._break(lane, error)

    def _build(self, key: Settings, rows: int) -> Lane:
        settings = replace(self._choose(replace(key, batch_size=rows), rows), batch_size=rows)
        return Lane(self.pipe.new_engine(settings), key, settings, self.pipe.images)
