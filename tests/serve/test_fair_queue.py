"""Who starts next."""

from __future__ import annotations

from helpers.served import spec

from lanternpp.serve.queue import FairQueue
from lanternpp.serve.tickets import Ticket


def queue(*clients: str) -> FairQueue:
    made = FairQueue()
    for number, client in enumerate(clients):
        made.add(Ticket(spec(number, client)))
    return made


def seeds(waiting: FairQueue) -> list[int]:
    return [ticket.spec.seed for ticket in waiting]


def test_one_client_is_served_in_the_order_of_its_requests():
    assert seeds(queue("a", "a", "a")) == [0, 1, 2]


def test_clients_take_turns():
    assert seeds(queue("a", "a", "a", "a", "b", "b", "c")) == [0, 4, 6, 1, 5, 2, 3]


def test_who_comes_late_waits_for_no_more_than_one_turn_of_each():
    waiting = queue("a", "a", "a", "a")
    for ticket in list(waiting)[:2]:
        waiting.remove(ticket)
    waiting.add(Ticket(spec(9, "b")))
    assert seeds(waiting) == [2, 9, 3]


def test_leaving_gives_no_one_a_better_turn():
    waiting = queue("a", "a", "b", "b")
    waiting.remove(next(iter(waiting)))
    assert seeds(waiting) == [2, 1, 3]
    waiting.add(Ticket(spec(9, "a")))  # behind its own first, as b's second is
    assert seeds(waiting) == [2, 1, 3, 9]


class Interrupted(list):
    """Entries of a queue; once a walk has seen the first one, something happens before it goes on."""

    def __iter__(self):
        for place in range(len(self)):
            yield self[place]
            if place == 0 and self.happens:
                happens, self.happens = self.happens, None
                happens()


def test_a_walk_sees_nobody_twice_while_others_join_and_leave():
    waiting = queue("a", "a", "b")
    first = next(iter(waiting))
    waiting.remove(first)
    waiting.add(first)  # its client's last
    waiting._entries = Interrupted(waiting._entries)
    waiting._entries.happens = lambda: waiting.add(Ticket(spec(9, "c")))
    assert seeds(waiting) == [2, 1, 0]
    assert seeds(waiting) == [2, 9, 1, 0]
