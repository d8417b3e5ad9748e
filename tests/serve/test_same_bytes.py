"""A picture has the same bytes as when it is drawn alone at the same rows, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from helpers.processes import until
from helpers.served import batcher_of, put

from lanternpp import Pipeline
from lanternpp.serve.tickets import Ticket

PROMPTS = ("a red tulip", "a tulip", "red tulip")
METHODS = ("ar", "eagle", "lantern++", "parallel", "independent", "jacobi", "lantern-jacobi", "eagle2")


def same(pipe: Pipeline, ticket: Ticket) -> None:
    """It is what is drawn by itself, in a new engine of as many rows."""
    drawn = ticket.result(300)
    pipe.release()
    result = pipe(ticket.prompt, seed=ticket.seed, **asdict(drawn.settings))
    assert drawn.codes.tolist() == result.codes[0].tolist()
    assert drawn.image.tobytes() == result.images[0].tobytes()
    assert list(drawn.accepted) == result.stats.accepted_per_pass


@pytest.mark.parametrize("method", ["ar", "lantern++", "jacobi"])
def test_whoever_sits_beside_it_comes_late_or_leaves(pipe, method):
    settings = pipe.settings(method)
    tickets = [Ticket(PROMPTS[i % 3], 7 * i, settings, client=str(i % 2)) for i in range(7)]
    with batcher_of(pipe, slots=4, max_engines=2) as batcher:
        leaver = tickets[1]
        for ticket in tickets[:5]:
            put(batcher, ticket)
        until(lambda: leaver.started is not None)
        leaver.cancel()
        for ticket in tickets[5:]:
            put(batcher, ticket)
        for ticket in tickets:
            if ticket is not leaver:
                same(pipe, ticket)


def test_a_slot_left_half_way_is_as_good_as_new(pipe):
    for method in METHODS:
        engine = pipe.new_engine(pipe.settings(method, batch_size=2))
        engine.admit(0, "a red tulip", 1)
        engine.admit(1, "a tulip", 2)
        engine.step()
        engine.drop(0)
        assert engine.done() == ([0] if int(engine.count[1]) < engine.target.length else [0, 1])
        engine.admit(0, "red tulip", 3)
        while len(engine.done()) < 2:
            engine.step()
        for slot, (prompt, seed) in enumerate([("red tulip", 3), ("a tulip", 2)]):
            pipe.release()
            expected = pipe(prompt, seed=seed, method=method, batch_size=2).codes[0].tolist()
            assert engine.collect(slot).codes.tolist() == expected, (method, slot)
