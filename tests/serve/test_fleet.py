"""Which lane an order enters, and which steps next."""

from __future__ import annotations

import pytest
from served import settings

from lanternpp.serve.fleet import Blocked, Fleet

AR, OTHER = settings("ar"), settings("ar", temperature=0.5)


class Stub:
    """A lane without an engine."""

    def __init__(self, key, rows):
        self.key, self.rows, self.seats, self.clock, self.used = key, rows, {}, 0.0, 0.0

    @property
    def free(self):
        return self.rows - len(self.seats)

    def fill(self, count):
        self.seats = dict.fromkeys(range(count), (None, 0.0))
        return self


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
