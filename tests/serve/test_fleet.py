"""Which lane an order enters, and which steps next."""

from __future__ import annotations

import pytest
from served import settings

from lanternpp.serve.fleet import Blocked, Fleet, Held

AR, OTHER = settings("ar"), settings("ar", temperature=0.5)


class Stub:
    """A lane without an engine."""

    def __init__(self, key, rows):
        self.key, self.rows, self.seats, self.clock, self.used = key, rows, {}, 0.0, 0.0

        self.clients, self.steps = [], 0

    @property
    def free(self):
        return self.rows - len(self.seats)

    def fill(self, count, *clients):
        self.seats = dict.fromkeys(range(count), (None, 0.0))
        self.clients = list(clients or [""])
        return self

    def step(self, seconds):
        self.steps += 1
        self.clock += seconds / len(self.seats)


@pytest.fixture
def fleet():
    return Fleet(Stub, slots=8, most=4)


@pytest.mark.parametrize(("waiting", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (40, 8)])
def test_an_empty_server_opens_the_smallest_lane_that_holds_what_waits(fleet, waiting, rows):
    assert fleet.lane(AR, waiting).rows == rows


def test_a_free_slot_of_a_running_lane_comes_first(fleet):
    lane = fleet.lane(AR, 3).fill(3)
    assert fleet.lane(AR, 1) is lane
    assert fleet.lane(OTHER, 1) is not lane


def test_a_full_lane_gets_a_larger_sister(fleet):
    fleet.lane(AR, 1).fill(1)
    assert fleet.lane(AR, 1).rows == 2


def test_a_small_lane_is_not_refilled_while_a_crowd_waits(fleet):
    small = fleet.lane(AR, 2).fill(1)
    large = fleet.lane(AR, 8)
    assert large is not small and large.rows == 8
    large.fill(8)
    assert fleet.lane(AR, 8) is None


def test_a_large_lane_is_not_kept_up_for_a_few(fleet):
    large = fleet.lane(AR, 8).fill(1)
    assert fleet.lane(AR, 1).rows == 1
    assert fleet.lane(AR, 3) is large


def test_the_idle_lane_used_longest_ago_makes_room(fleet):
    fleet.most = 2
    first, second = fleet.lane(AR, 1), fleet.lane(AR, 2)
    first.used, second.used = 2.0, 1.0
    third = fleet.lane(OTHER, 1)
    assert fleet.lanes == (first, third)


def test_an_order_waits_where_all_engines_are_busy(fleet):
    fleet.most = 1
    fleet.lane(AR, 2).fill(1)
    with pytest.raises(Blocked):
        fleet.lane(OTHER, 1)
    with pytest.raises(Blocked):
        fleet.lane(AR, 8)


def test_the_lane_furthest_behind_steps_next_and_idleness_saves_nothing(fleet):
    busy, other = fleet.lane(AR, 1).fill(1), fleet.lane(OTHER, 1).fill(1)
    busy.clock, other.clock = 5.0, 7.0
    assert fleet.running[0] is busy
    late = fleet.lane(AR, 4)
    assert late.clock == 5.0


def shared(fleet, *costs, turns=1200):
    """Steps of every lane, where each costs so many seconds, after so many turns."""
    for _ in range(turns):
        lane, client = fleet.turn()
        seconds = costs[fleet.lanes.index(lane)]
        lane.step(seconds)
        fleet.pay(client, seconds)
    return [lane.steps for lane in fleet.lanes]


def opened(fleet, *clients):
    """A lane of one row for each, all of other settings, as a client gets who changes a dial in every request."""
    for client in clients:
        lane = fleet.lane(settings("ar", temperature=0.1 + len(fleet.lanes) / 100), 1, client)
        lane.fill(1, client)


def test_a_client_that_opens_lanes_gets_no_more_time(fleet):
    opened(fleet, "many", "many", "many", "one")
    assert shared(fleet, 1, 1, 1, 1) == [200, 200, 200, 600]


def test_time_is_shared_whatever_a_step_takes(fleet):
    opened(fleet, "slow", "slow", "quick")
    assert shared(fleet, 4, 4, 1, turns=1000) == [100, 100, 800]


def test_who_pays_for_a_step_of_a_shared_lane_takes_turns_and_nobody_starves(fleet):
    fleet.lane(AR, 8, "many").fill(8, "many", "one")
    fleet.lane(OTHER, 1, "many").fill(1, "many")
    fleet.lane(settings("ar", cfg=2), 1, "third").fill(1, "third")
    both, own, third = shared(fleet, 8, 8, 8)
    assert third == 400 and both + own == 800 and own > 80  # pictures of one client advance evenly


def test_who_comes_late_has_nothing_saved_and_nothing_owed(fleet):
    opened(fleet, "early")
    shared(fleet, 5, turns=100)
    opened(fleet, "late")
    first, second = fleet.lanes
    before = first.steps
    shared(fleet, 1, 1, turns=100)
    assert (first.steps - before, second.steps) == (50, 50)


def test_prefills_are_paid_for(fleet):
    opened(fleet, "one")
    shared(fleet, 1, turns=5)
    opened(fleet, "many")
    fleet.pay("many", 30.5)
    assert shared(fleet, 1, 1, turns=30) == [5 + 30, 0]


def test_the_last_lane_is_not_for_a_client_that_has_all_others(fleet):
    opened(fleet, "many", "many", "many")
    with pytest.raises(Held):
        fleet.lane(AR, 1, "many")
    lane = fleet.lane(AR, 1, "one").fill(1, "one")
    with pytest.raises(Blocked) as waits:
        fleet.lane(OTHER, 1, "many")
    assert not isinstance(waits.value, Held)  # all are busy: whoever stands behind waits as well
    lane.seats = {}
    fleet.lanes[0].fill(1, "third")
    assert fleet.lane(OTHER, 1, "many")
