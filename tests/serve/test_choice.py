"""A server that measures which tree is fastest for how many pictures, and draws with it."""

from __future__ import annotations

import pytest
from models import write_model
from served import batcher_of

from lanternpp import Pipeline
from lanternpp.cli.serve import by_batch_size
from lanternpp.serve.batcher import Order
from lanternpp.tuning import batches
from lanternpp.tuning.batches import Cell, Choice


@pytest.fixture
def pipe(tmp_path, monkeypatch) -> Pipeline:
    """The tiny model."""
    monkeypatch.setattr(batches, "WARM", 0)
    monkeypatch.setattr(batches, "STEPS", 1)
    return Pipeline.from_pretrained(str(write_model(tmp_path / "tiny")), dtype="float32", device="cpu")


def test_it_is_measured_at_the_first_start_and_read_at_the_second(pipe, capsys) -> None:
    settings = pipe.settings("lantern++", proposer="parallel", tree="chain-3")
    first = by_batch_size(pipe, settings, 2)
    assert "measuring which tree" in capsys.readouterr().err
    assert {cell.rows for cell in first.cells} == {1, 2}
    assert by_batch_size(pipe, settings, 2) == first and capsys.readouterr().err == ""


def test_pictures_are_those_of_the_settings_they_say(pipe) -> None:
    settings = pipe.settings("lantern++", proposer="parallel", tree="chain-3")
    rates = {1: {"chain-3": 1.5, "chain-2": 1.2}, 2: {"chain-3": 1.1, "chain-2": 1.2}, 4: {"chain-3": 0.9}}
    cells = [Cell(rows, tree, 2, 1, 1, gain) for rows, row in rates.items() for tree, gain in row.items()]
    choice = Choice(settings, tuple(cells))
    for rows, (method, tree) in {
        1: ("lantern++", "chain-3"),
        2: ("lantern++", "chain-2"),
        4: ("ar", None),
    }.items():
        with batcher_of(pipe, slots=4, choose=choice) as batcher:
            orders = [Order("a red tulip", seed, settings) for seed in range(rows)]
            drawn = [ticket.result(300) for ticket in batcher.submit_all(orders)]
        assert {(one.rows, one.settings.method, one.settings.tree) for one in drawn} == {(rows, method, tree)}
        given = {"proposer": "parallel", "tree": tree} if tree else {}
        alone = pipe("a red tulip", n=rows, method=method, batch_size=rows, **given)
        assert [one.codes.tolist() for one in drawn] == alone.codes.tolist()
