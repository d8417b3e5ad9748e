"""The queue: clients take turns, and within one client it is first come, first served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from lanternpp.serve.tickets import Ticket


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
