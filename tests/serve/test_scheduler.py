"""The order of pictures, the batch runner of each, and which runner steps next."""

from __future__ import annotations

import time

import pytest
from helpers.served import make_ticket, settings

from lanternpp.serve.scheduler import MustWait, Scheduler, with_ticket
from lanternpp.serve.tickets import Ticket

AR, OTHER = settings("ar"), settings("ar", temperature=0.5)


class Stub:
    """A batch runner without an engine."""

    def __init__(self, key, rows):
        self.key, self.settings = key, settings(batch_size=rows)
        self.last_used = 0.0
        self.tickets, self.clients, self.steps = [], [], 0

    def fill(self, count, *clients):
        self.tickets = [None] * count
        self.clients = list(clients or [""])
        return self

    def step(self):
        self.steps += 1
        self.last_used = time.monotonic()


@pytest.fixture
def scheduler():
    return Scheduler(Stub, slots=8, max_runners=4)


@pytest.mark.parametrize(("waiting", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (40, 8)])
def test_an_empty_server_opens_the_smallest_runner_for_the_queue(scheduler, waiting, rows):
    assert scheduler.runner_for(AR, waiting).settings.batch_size == rows


def waits(scheduler, *given):
    """Assert that a picture must wait; return which pictures wait with it."""
    with pytest.raises(MustWait) as error:
        scheduler.runner_for(*given)
    return error.value.whom


@pytest.mark.parametrize(
    ("rows", "running", "waiting", "entered"),
    [
        pytest.param(4, 3, 1, 4, id="a free slot of a running runner comes first"),
        pytest.param(1, 1, 1, 2, id="a larger runner is opened beside a full one"),
        pytest.param(2, 1, 8, 8, id="a small runner is not refilled while many wait"),
        pytest.param(8, 8, 8, None, id="there is no larger one"),
        pytest.param(8, 1, 1, 1, id="a large runner is not kept for one"),
        pytest.param(8, 1, 3, 8, id="a large runner is kept for several"),
    ],
)
def test_which_runner_a_picture_enters(scheduler, rows, running, waiting, entered):
    runner = scheduler.runner_for(AR, rows).fill(running)
    if entered is None:
        assert waits(scheduler, AR, waiting) == AR
    else:
        chosen = scheduler.runner_for(AR, waiting)
        assert chosen.settings.batch_size == entered and (chosen is runner) == (entered == rows)
    assert scheduler.runner_for(OTHER, rows) is not runner


def test_the_idle_runner_used_longest_ago_makes_room(scheduler):
    scheduler.max_runners = 2
    first, second = scheduler.runner_for(AR, 1), scheduler.runner_for(AR, 2)
    first.last_used, second.last_used = 2.0, 1.0
    third = scheduler.runner_for(OTHER, 1)
    assert scheduler.runners == (first, third)


def test_a_picture_waits_where_all_engines_are_busy(scheduler):
    scheduler.max_runners = 1
    scheduler.runner_for(AR, 2).fill(1)
    assert waits(scheduler, OTHER, 1) is None
    assert waits(scheduler, AR, 8) is None


def shared(scheduler, *costs, turns=1200):
    """The steps of each batch runner after so many turns, where a step of each costs so many seconds."""
    for _ in range(turns):
        runner, client = scheduler.next_step()
        seconds = costs[scheduler.runners.index(runner)]
        runner.step()
        scheduler.charge(client, seconds)
    return [runner.steps for runner in scheduler.runners]


def opened(scheduler, *clients):
    """A batch runner of one row for each client; all have other settings, as after a changed dial in every request."""
    for client in clients:
        runner = scheduler.runner_for(
            settings("ar", temperature=0.1 + len(scheduler.runners) / 100), 1, client
        )
        runner.fill(1, client)


def test_clients_get_equal_time_whatever_a_step_takes(scheduler):
    opened(scheduler, "slow", "slow", "quick")
    assert shared(scheduler, 4, 4, 1, turns=1000) == [100, 100, 800]


def test_steps_of_a_shared_runner_are_charged_in_turn_and_no_client_starves(scheduler):
    scheduler.runner_for(AR, 8, "many").fill(8, "many", "one")
    scheduler.runner_for(OTHER, 1, "many").fill(1, "many")
    scheduler.runner_for(settings("ar", cfg=2), 1, "third").fill(1, "third")
    both, own, third = shared(scheduler, 8, 8, 8)
    assert third == 400 and both + own == 800 and own > 80  # pictures of one client advance evenly


def test_a_new_client_has_neither_credit_nor_debt(scheduler):
    opened(scheduler, "early")
    shared(scheduler, 5, turns=100)
    opened(scheduler, "late")
    first, second = scheduler.runners
    before = first.steps
    shared(scheduler, 1, 1, turns=100)
    assert (first.steps - before, second.steps) == (50, 50)


def test_prefills_are_charged(scheduler):
    opened(scheduler, "one")
    shared(scheduler, 1, turns=5)
    opened(scheduler, "many")
    scheduler.charge("many", 30.5)
    assert shared(scheduler, 1, 1, turns=30) == [5 + 30, 0]


def test_the_last_runner_is_reserved_for_other_clients(scheduler):
    opened(scheduler, "many", "many", "many")
    assert waits(scheduler, AR, 1, "many") == "many"
    runner = scheduler.runner_for(AR, 1, "one").fill(1, "one")
    assert waits(scheduler, OTHER, 1, "many") is None  # all are busy: pictures after it wait as well
    runner.tickets = []
    scheduler.runners[0].fill(1, "third")
    assert scheduler.runner_for(OTHER, 1, "many")


def queue(*clients: str, first: int = 0, tickets: tuple[Ticket, ...] = ()) -> tuple[Ticket, ...]:
    """Tickets and new ones of these clients, whose seeds count from `first`, in the order in which they should start."""
    for seed, client in enumerate(clients, first):
        tickets = with_ticket(tickets, make_ticket(seed, client))
    return tickets


def seeds(tickets: tuple[Ticket, ...]) -> list[int]:
    return [ticket.seed for ticket in tickets if ticket.started is None]


def test_clients_take_turns_and_requests_of_one_keep_their_order():
    assert seeds(queue("a", "a", "a", "a", "b", "b", "c")) == [0, 4, 6, 1, 5, 2, 3]


def test_a_new_client_waits_for_at_most_one_turn_of_each_other():
    waiting = queue("a", "a", "a", "a")
    for ticket in waiting[:2]:
        ticket.started = 1.0
    assert seeds(queue("b", first=9, tickets=waiting)) == [2, 9, 3]


def test_cancelling_does_not_improve_a_clients_turn():
    waiting = queue("a", "a", "b", "b")[1:]
    assert seeds(waiting) == [2, 1, 3]
    # after its own first, as b's second is
    assert seeds(queue("a", first=9, tickets=waiting)) == [2, 1, 3, 9]
