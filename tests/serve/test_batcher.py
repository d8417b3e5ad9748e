"""Submitted pictures: slots, deadlines, rejections, failures, shutdown. Engines step when a test allows them to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from fastapi.testclient import TestClient
from helpers.processes import SECONDS, wait_until
from helpers.refusals import rejects
from helpers.served import batcher_of, make_ticket, settings, submit, submit_all
from starlette.exceptions import HTTPException

from lanternpp import InputError, Pipeline
from lanternpp.serve import batcher as batcher_module
from lanternpp.serve.app import create_app
from lanternpp.serve.tickets import Ticket

PROMPTS = ("a red tulip", "a tulip", "red tulip")
METHODS = ("ar", "eagle", "lantern++", "parallel", "independent", "jacobi", "lantern-jacobi", "eagle2")


def seeds(*numbers: int) -> list[Ticket]:
    return [make_ticket(seed) for seed in numbers]


def test_pictures_join_a_running_batch_and_leave_it(slow):
    with batcher_of(slow, slots=4) as batcher:
        first = submit_all(batcher, seeds(1, 2, 3))
        wait_until(lambda: batcher.running == 3)
        late = submit(batcher, make_ticket(4))
        slow.allow(1)
        wait_until(lambda: len(slow.admitted) == 4)
        slow.allow()
        drawn = [ticket.result(120) for ticket in (*first, late)]
        assert [one.settings.batch_size for one in drawn] == [4] * 4
        assert len(slow.engines) == 1
        wait_until(lambda: batcher.running == 0)


def test_a_picture_leaves_the_queue_when_its_prefill_begins(slow, monkeypatch):
    begun, go, admit = threading.Event(), threading.Event(), batcher_module.BatchRunner.admit

    def slow_admit(runner, ticket):
        begun.set()
        assert go.wait(SECONDS)
        admit(runner, ticket)

    monkeypatch.setattr(batcher_module.BatchRunner, "admit", slow_admit)
    with batcher_of(slow, slots=1, queue=1) as batcher:
        submit(batcher, make_ticket(1))
        assert begun.wait(SECONDS) and batcher.queued == 0
        submit(batcher, make_ticket(2))
        with pytest.raises(HTTPException, match="429"):
            submit(batcher, make_ticket(3))
        go.set()


def test_a_request_whose_encoding_fails_leaves_the_queue(slow, monkeypatch):
    def no_thread(tickets):
        raise RuntimeError("can't start new thread")

    with batcher_of(slow) as batcher, TestClient(create_app(batcher)) as client:
        monkeypatch.setattr(batcher, "encode", no_thread)
        body = {"prompt": "a red tulip", "n": 2}
        assert client.post("/v1/images/generations", json=body).status_code == 500 and batcher.queued == 0


def test_deadlines_apply_in_the_queue_and_in_a_slot(slow):
    with batcher_of(slow, slots=1) as batcher:
        running, waiting, fine = (submit(batcher, make_ticket(seed, deadline=600.5)) for seed in (1, 2, 3))
        wait_until(lambda: slow.admitted == [1])
        for ticket in (running, waiting):
            ticket.arrived -= 700
        slow.allow(1)
        for ticket in (running, waiting):
            with pytest.raises(HTTPException, match=r"504: .* within 600\.5 s"):
                ticket.result(120)
        slow.allow()
        assert fine.result(120) and slow.admitted == [1, 3]
        # it holds from the arrival of the request: this one waited for other prompts, and its own is not encoded
        with pytest.raises(HTTPException, match="504"):
            submit(batcher, make_ticket(4, prompt="never", deadline=600.5, arrived=time.monotonic() - 700))


def test_an_engine_that_cannot_be_built_fails_only_its_picture(slow):
    def at_batch(settings, rows):
        if settings.temperature == 0:
            raise InputError("no drafter")
        return replace(settings, batch_size=rows)

    slow.at_batch = at_batch
    with batcher_of(slow) as batcher:
        slow.allow()
        rejects("no drafter", submit(batcher, Ticket("a tulip", 1, settings(temperature=0.0))).result, 120)
        assert submit(batcher, make_ticket(2)).result(120)


def test_the_server_closes_while_a_step_hangs(slow, monkeypatch, caplog):
    monkeypatch.setattr(batcher_module, "JOIN_SECONDS", 0.05)
    with batcher_of(slow, slots=1) as batcher:
        running, waiting = submit_all(batcher, seeds(1, 2))
        wait_until(lambda: slow.admitted == [1])
        assert not batcher.close(timeout=0)
        assert not batcher.close(), "a later call knows that pictures were given up"
        for ticket in (running, waiting):
            with pytest.raises(HTTPException, match=r"503: .* shut down before"):
                ticket.result(0)
        assert "waited for no longer" in caplog.text


def test_only_accepted_prompts_are_encoded_and_drawing_continues_meanwhile(slow, monkeypatch):
    """Prompts are encoded once there is a place for their pictures, while the thread that draws goes on."""
    encoding, go, encode = [], threading.Semaphore(0), slow.target.prompt

    def prompt(conditions, branches):
        encoding.extend(conditions)
        if conditions != ["a red tulip"]:
            assert go.acquire(timeout=SECONDS)
        return encode(conditions, branches)

    monkeypatch.setattr(slow.target, "prompt", prompt)
    with batcher_of(slow, slots=2, queue=2) as batcher:
        running = submit(batcher, make_ticket(1))
        wait_until(lambda: slow.admitted == [1])
        late = [make_ticket(seed, prompt="red tulip") for seed in (2, 3)]
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(submit_all, batcher, late)
            wait_until(lambda: encoding == ["a red tulip", "red tulip"])
            with pytest.raises(HTTPException, match="429: the queue has 2 pictures already"):
                submit(batcher, make_ticket(4, prompt="never"))
            slow.allow()
            assert running.result(120), "its last steps came while a prompt was encoded"
            go.release()
            assert all(ticket.result(120) for ticket in waiting.result(120))
        batcher.close()
        with pytest.raises(HTTPException, match="503"):
            submit(batcher, make_ticket(5, prompt="never"))
    assert encoding == ["a red tulip", "red tulip"], "the thread that draws encodes nothing"


def test_a_client_that_changes_a_dial_in_every_request_does_not_use_all_runners(slow):
    def ticket_of(seed, client):
        return Ticket("a red tulip", seed, settings("ar", temperature=0.1 + seed / 100), client=client)

    with batcher_of(slow, slots=1, queue=40, max_engines=3) as batcher:
        submit_all(batcher, [ticket_of(seed, "many") for seed in range(10)])
        wait_until(lambda: len(slow.admitted) == 2)
        submit(batcher, ticket_of(20, "one"))
        slow.allow(1)  # no picture is finished by then
        wait_until(lambda: 20 in slow.admitted)
        assert slow.admitted == [0, 1, 20]
        slow.allow()
        wait_until(lambda: len(slow.admitted) == 11)


def test_the_batch_runners_of_a_client_step_in_turn(slow):
    with batcher_of(slow, slots=1) as batcher:
        for temperature in (0.5, 0.6):
            submit(batcher, Ticket("a red tulip", 1, settings(temperature=temperature)))
        slow.allow(1)
        wait_until(lambda: len(slow.admitted) == 2)
        slow.allow(3)
        wait_until(lambda: [runner.batch.counts[0] for runner in batcher._scheduler.runners] == [3, 3])


# A picture has the same bytes as when it is drawn alone at the same rows, whatever else is in the batch.


def check_same(pipe: Pipeline, ticket: Ticket) -> None:
    """Assert that a picture equals the one drawn alone in a new engine of the same batch size."""
    drawn = ticket.result(300)
    pipe.release()
    result = pipe(ticket.prompt, seed=ticket.seed, **asdict(drawn.settings))
    assert drawn.codes.tolist() == result.codes[0].tolist()
    assert drawn.image.tobytes() == result.images[0].tobytes()
    assert list(drawn.accepted) == result.stats.accepted_per_pass


@pytest.mark.parametrize("method", ["ar", "lantern++", "jacobi"])
def test_pictures_do_not_depend_on_others_in_the_batch(pipe, method):
    settings = pipe.settings(method)
    tickets = [Ticket(PROMPTS[i % 3], 7 * i, settings, client=str(i % 2)) for i in range(7)]
    with batcher_of(pipe, slots=4, max_engines=2) as batcher:
        cancelled = tickets[1]
        for ticket in tickets[:5]:
            submit(batcher, ticket)
        wait_until(lambda: cancelled.started is not None)
        cancelled.cancel()
        for ticket in tickets[5:]:
            submit(batcher, ticket)
        for ticket in tickets:
            if ticket is not cancelled:
                check_same(pipe, ticket)


def test_a_dropped_sample_leaves_no_trace_in_its_slot(pipe):
    for method in METHODS:
        engine = pipe.new_engine(pipe.settings(method, batch_size=2))
        length = engine.target.length
        assert engine.decided() == [length, length], "every slot is idle at first"
        engine.admit(0, "a red tulip", 1)
        engine.admit(1, "a tulip", 2)
        engine.step()
        engine.drop(0)
        assert engine.decided() == [length, int(engine.count[1])]
        engine.admit(0, "red tulip", 3)
        while min(engine.decided()) < length:
            engine.step()
        for slot, (prompt, seed) in enumerate([("red tulip", 3), ("a tulip", 2)]):
            pipe.release()
            expected = pipe(prompt, seed=seed, method=method, batch_size=2).codes[0].tolist()
            assert engine.collect(slot).codes.tolist() == expected, (method, slot)
