"""The lanes of a server: which one an order enters, and which one steps next.

Lanes have 1, 2, 4 ... `slots` rows, at most one lane per settings and size. With w orders of its settings waiting, the
size that fits is the smallest that holds w. An order enters

1. the largest running lane of its settings with a free slot, if it has the size that fits or more (a small lane is
   not refilled while a crowd waits) and at least half of its rows would then be in use (a large one is not kept up
   for a few);
2. else the idle or new lane of the smallest size that fits and is not taken;
3. else it waits. At most `most` engines are kept; the idle one that was used longest ago makes room. While an order
   waits for that room, none behind it enters anything, so that the lanes in its way empty.

The last of the `most` lanes is not for a client that has pictures in all others: its order waits, and its orders behind
that one too, but nobody else's.

Clients take turns to step a lane that has a picture of theirs, and whose turn it is pays for all of its step. The next
turn is the client's that paid the fewest seconds, so clients with pictures get equal time, however many lanes one of them
opens. Of a client's lanes the one with the fewest seconds per picture steps, so that its pictures advance evenly.
"""

from __future__ import annotations

from collections.abc import Callable

from lanternpp.serve.lanes import Lane
from lanternpp.serve.orders import Ticket
from lanternpp.settings import Settings


class Blocked(Exception):  # noqa: N818 - a state, not a fault
    """An order waits until one of the engines is idle."""


class Held(Blocked):
    """An order waits until its client has a lane less."""


class Fleet:
    """Every lane there is, and the seconds that clients paid. Changed by one thread; `lanes` may be read by any."""

    def __init__(self, build: Callable[[Settings, int], Lane], slots: int, most: int):
        """build: a lane for these settings of so many rows; slots: most rows; most: most lanes."""
        self.build, self.slots, self.most = build, slots, most
        self.lanes: tuple[Lane, ...] = ()
        self._paid: dict[str, float] = {}  # seconds of clients with pictures; a new one starts at the least

    @property
    def running(self) -> list[Lane]:
        """Lanes with a picture, the one with the fewest seconds per picture first."""
        return sorted((lane for lane in self.lanes if lane.seats), key=lambda lane: lane.clock)

    @property
    def tickets(self) -> list[Ticket]:
        """All that sit in a slot."""
        return [ticket for lane in self.lanes for ticket, _ in list(lane.seats.values())]

    def turn(self) -> tuple[Lane, str] | None:
        """The lane that steps next, and the client that pays for it; None: no lane has a picture."""
        running = self.running
        clients = list(dict.fromkeys(client for lane in running for client in lane.clients))
        if not clients:
            return None
        known = {client: self._paid[client] for client in clients if client in self._paid}
        least = min(known.values(), default=0.0)
        self._paid = {client: known.get(client, least) for client in clients}
        client = min(clients, key=self._paid.__getitem__)
        return next(lane for lane in running if client in lane.clients), client

    def pay(self, client: str, seconds: float) -> None:
        """What was computed in a client's turn."""
        self._paid[client] = self._paid.get(client, min(self._paid.values(), default=0.0)) + seconds

    def lane(self, key: Settings, waiting: int, client: str = "") -> Lane | None:
        """The lane that the first of so many orders of these settings enters; None: all it may have are full.

        Raises Held where its client has its share of lanes, Blocked where an engine would have to be closed and all are
        busy, and whatever building one raises.
        """
        lane = self._find(key, waiting, client)
        if lane is not None and not lane.seats and (running := self.running):
            lane.clock = max(lane.clock, running[0].clock)  # it was idle: no claim to the time since
        return lane

    def _find(self, key: Settings, waiting: int, client: str) -> Lane | None:
        fit = min(self.slots, 1 << (waiting - 1).bit_length())
        own = {lane.rows: lane for lane in self.lanes if lane.key == key}
        for rows in sorted(own, reverse=True):
            lane = own[rows]
            if rows >= fit and lane.seats and lane.free and 2 * (len(lane.seats) + waiting) >= rows:
                return lane
        while fit <= self.slots:
            if fit not in own or not own[fit].seats:
                idle = [lane for lane in self.lanes if not lane.seats]
                if len(self.lanes) >= self.most and not idle:
                    raise Blocked
                if sum(client in lane.clients for lane in self.lanes) >= max(1, self.most - 1):
                    raise Held
                return own[fit] if fit in own else self._open(key, fit, idle)
            fit *= 2
        return None

    def _open(self, key: Settings, rows: int, idle: list[Lane]) -> Lane:
        """A new lane, in place of an idle one where there are many."""
        if len(self.lanes) >= self.most:
            self.close(min(idle, key=lambda lane: lane.used))
        lane = self.build(key, rows)
        self.lanes = (*self.lanes, lane)
        return lane

    def close(self, lane: Lane) -> None:
        """Let go of a lane."""
        self.lanes = tuple(other for other in self.lanes if other is not lane)
