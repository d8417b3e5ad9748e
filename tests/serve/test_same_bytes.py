"""A picture has the same bytes as when it is drawn alone at the same rows, whatever else is in the batch."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from helpers.processes import until
from helpers.served import batcher_of, put, put_all

from lanternpp import Pipeline
from lanternpp.serve.tickets import FinishedImage, ImageSpec

PROMPTS = ("a red tulip", "a tulip", "red tulip")
METHODS = ("ar", "eagle", "lantern++", "parallel", "independent", "jacobi", "lantern-jacobi", "eagle2")


def alone(pipe: Pipeline, spec: ImageSpec, drawn: FinishedImage):
    """The same picture by itself, in a new engine of as many rows."""
    pipe.release()
    return pipe(spec.prompt, seed=spec.seed, **asdict(drawn.settings))


def same(pipe: Pipeline, spec: ImageSpec, drawn: FinishedImage) -> None:
    result = alone(pipe, spec, drawn)
    assert drawn.codes.tolist() == result.codes[0].tolist()
    assert drawn.image.tobytes() == result.images[0].tobytes()
    assert list(drawn.accepted) == result.stats.accepted_per_pass


@pytest.mark.parametrize("method", METHODS)
def test_whoever_sits_beside_it_comes_late_or_leaves(pipe, method):
    settings = pipe.settings(method)
    specs = [ImageSpec(PROMPTS[i % 3], 7 * i, settings, client=str(i % 2)) for i in range(7)]
    with batcher_of(pipe, slots=4, max_engines=2) as batcher:
        tickets = put_all(batcher, specs[:5])
        leaver = tickets[1]
        until(lambda: leaver.started is not None)
        leaver.cancel()
        tickets += put_all(batcher, specs[5:])
        for spec, ticket in zip(specs, tickets, strict=True):
            if ticket is not leaver:
                same(pipe, spec, ticket.result(300))


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


def test_what_is_chosen_for_a_runner_is_what_the_picture_says(pipe, monkeypatch):
    ar = pipe.settings("ar")
    monkeypatch.setattr(
        pipe, "at_batch", lambda settings, rows: replace(ar if rows >= 4 else settings, batch_size=rows)
    )
    specs = [ImageSpec("a red tulip", seed, pipe.settings("lantern++")) for seed in range(4)]
    with batcher_of(pipe, slots=4) as batcher:
        drawn = [ticket.result(300) for ticket in put_all(batcher, specs)]
        small = put(batcher, specs[0]).result(300)
    assert {one.settings.method for one in drawn if one.settings.batch_size == 4} == {"ar"}
    assert (small.settings.batch_size, small.settings.method) == (1, "lantern++")
    for spec, one in [*zip(specs, drawn, strict=True), (specs[0], small)]:
        same(pipe, spec, one)
