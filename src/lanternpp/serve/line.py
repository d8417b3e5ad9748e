"""The queue: clients take turns, and within one client it is first come, first served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from lanternpp.serve.orders import Ticket


class Line:
    """Waiting tickets in the order in which they should start.

    Every order gets a round when it comes: the one after its client's last order here, and no earlier than
    the round that is being served. So a client with forty orders and one with a single order alternate.
    """

    def __init__(self) -> None:
        # round, arrival; a list is never changed, only replaced, so that a thread may walk one while another joins
        self._waiting: list[tuple[int, int, Ticket]] = []
        self._round = self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        """In the order of their turns; may be changed meanwhile."""
        return iter([ticket for *_, ticket in self._waiting])

    def join(self, ticket: Ticket) -> None:
        """A ticket enters."""
        client = ticket.order.client
        rounds = [turn for turn, _, other in self._waiting if other.order.client == client]
        turn = max(self._round, max(rounds, default=-1) + 1)
        self._arrivals += 1
        waiting = list(self._waiting)
        bisect.insort(waiting, (turn, self._arrivals, ticket))
        self._waiting = waiting

    def leave(self, ticket: Ticket) -> None:
        """A ticket leaves, because its picture starts or because it is wanted no more."""
        turn = next(turn for turn, _, waiting in self._waiting if waiting is ticket)
        self._waiting = [entry for entry in self._waiting if entry[-1] is not ticket]
        self._round = max(self._round, min((t for t, *_ in self._waiting), default=turn))
