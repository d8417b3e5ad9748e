"""A server that measures which tree is fastest for how many pictures, and draws with it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from models import write_model
from served import PacedPipe, batcher_of, until

from lanternpp import Pipeline
from lanternpp.cli.serve import measuring
from lanternpp.serve.app import create_app
from lanternpp.serve.batcher import ImageSpec
from lanternpp.serve.calibration import Calibration
from lanternpp.serve.server_config import ServerConfig
from lanternpp.tuning import batches
from lanternpp.tuning.batches import BatchChoice, Cell


@pytest.fixture
def pipe(tmp_path, monkeypatch) -> Pipeline:
    """The tiny model."""
    monkeypatch.setattr(batches, "WARM", 0)
    monkeypatch.setattr(batches, "STEPS", 1)
    return Pipeline.from_pretrained(str(write_model(tmp_path / "tiny")), dtype="float32", device="cpu")


def test_it_serves_at_once_measures_while_nobody_waits_and_knows_at_the_second_start(pipe) -> None:
    """Measuring goes on a step at a time, only when there is nothing to draw, and says how far it is."""
    config, messages = ServerConfig("lantern++", {"proposer": "parallel"}), []
    paced = PacedPipe(pipe)  # steps of pictures and of measuring alike
    first = Calibration(measuring(paced, config, 2), messages.append)
    assert not first.finished and not messages, "nothing is measured before the server is there"
    with batcher_of(paced, slots=2, calibration=first) as batcher, TestClient(app_of(batcher)) as http:

        def health() -> dict:
            return http.get("/healthz").json()["calibration"]

        until(lambda: messages)
        assert "while no request waits" in messages[0] and health() == {
            "state": "measuring",
            "done": 0,
            "total": 14,
        }
        plain, tickets = ImageSpec("a red tulip", 1, pipe.settings("ar")), []
        asking = threading.Thread(target=lambda: tickets.append(batcher.submit(plain)))
        asking.start()
        until(lambda: batcher._reserved == 1)
        paced.allow(1)  # the step that was under way
        asking.join(120)
        until(lambda: batcher.stats.running == 1)
        assert health() == {"state": "paused", "done": 0, "total": 14}
        paced.allow(pipe.target.length - 1)  # its prefill decided a code
        assert tickets[0].result(120).settings.method == "ar"
        until(lambda: health()["state"] == "measuring")
        paced.allow(1 << 20)
        until(lambda: health() == {"state": "done", "done": 14, "total": 14})
        assert len(messages) == 2
        settings = config.settings(pipe, None, {})
        drawn = batcher.submit(ImageSpec("a red tulip", 1, settings)).result(300)
        assert drawn.settings == replace(first.choose(settings, 1), batch_size=1)
    assert {cell.rows for cell in first.choose.cells} == {1, 2}
    second = Calibration(measuring(pipe, config, 2), messages.append)
    assert second.choose == first.choose and len(messages) == 2


def test_measuring_that_breaks_breaks_nothing_else(pipe, caplog) -> None:
    def steps():
        yield 0, 2
        raise RuntimeError("out of memory")

    broken = Calibration(steps())
    with batcher_of(pipe, calibration=broken) as batcher, TestClient(app_of(batcher)) as http:
        until(lambda: broken.finished)
        assert http.get("/healthz").json()["calibration"] == {"state": "failed", "done": 0, "total": 2}
        assert "out of memory" in caplog.text and batcher.broken is None
        assert batcher.submit(ImageSpec("a red tulip", 1, pipe.settings("ar"))).result(300)


def app_of(batcher):
    return create_app(batcher, page=False)


def test_pictures_are_those_of_the_settings_they_say(pipe) -> None:
    settings = pipe.settings("lantern++", proposer="parallel", tree="chain-3")
    rates = {1: {"chain-3": 1.5, "chain-2": 1.2}, 2: {"chain-3": 1.1, "chain-2": 1.2}, 4: {"chain-3": 0.9}}
    cells = [Cell(rows, tree, 2, 1, 1, gain) for rows, row in rates.items() for tree, gain in row.items()]
    choice = BatchChoice(settings, tuple(cells))
    for rows, (method, tree) in {
        1: ("lantern++", "chain-3"),
        2: ("lantern++", "chain-2"),
        4: ("ar", None),
    }.items():
        with batcher_of(pipe, slots=4, choose=choice) as batcher:
            specs = [ImageSpec("a red tulip", seed, settings) for seed in range(rows)]
            drawn = [ticket.result(300) for ticket in batcher.submit_all(specs)]
        assert {(one.rows, one.settings.method, one.settings.tree) for one in drawn} == {(rows, method, tree)}
        given = {"proposer": "parallel", "tree": tree} if tree else {}
        alone = pipe("a red tulip", n=rows, method=method, batch_size=rows, **given)
        assert [one.codes.tolist() for one in drawn] == alone.codes.tolist()
