"""`lanternpp throughput` on the tiny model: what it writes, and what a stop loses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from lanternpp.api.fit.choice import plain_settings
from lanternpp.api.pipeline import Pipeline
from lanternpp.tuning.batch_runner import BatchRunner
from lanternpp.tuning.journal import LINES

SMALL = ("--batch-sizes", "1,2", "--rounds", 2, "--dtype", "float32", "--prompts", "p.txt", "-o", "t")


@pytest.fixture
def own(model, tmp_path, elsewhere) -> Path:
    """A copy of the tiny model, and two prompts."""
    (elsewhere / "p.txt").write_text("a red tulip\na tulip\n")
    return Path(shutil.copytree(model, tmp_path / "own"))


def test_every_way_is_measured_at_every_size_and_a_stop_loses_one_turn(run, own, monkeypatch):
    requested = (
        "throughput",
        "--model",
        own,
        *SMALL,
        "--proposer",
        "parallel",
        "--tree",
        "chain-3",
        "--json",
    )
    turns = []
    monkeypatch.setattr(Pipeline, "fit", lambda self, settings: plain_settings(settings))
    turn = BatchRunner.turn
    monkeypatch.setattr(BatchRunner, "turn", lambda self: turns.append(self.engine.batch) or turn(self))
    outcome = run(*requested)
    assert outcome.code == 0, outcome.err
    reported = json.loads(outcome.out)
    assert reported == json.loads(Path("t/throughput.json").read_text())
    assert [(rate["rows"], rate["kind"]) for rate in reported["rates"]] == [
        (rows, kind) for rows in (1, 2) for kind in ("plain", "own", "fitted")
    ]
    for plain, own_draft, fitted in (reported["rates"][:3], reported["rates"][3:]):
        assert plain["speedup"] == 1 and plain["codes"] == 1 and plain["method"] == "ar"
        assert own_draft["tree"] == "chain-3" and 1 <= own_draft["codes"] <= 4 and own_draft["pictures"] > 0
        assert fitted == plain | {"kind": "fitted"}
    table = Path("t/table.md").read_text().splitlines()
    assert len(table) == 4 and all(line.count("|") == 10 for line in table)
    with Image.open("t/throughput.png") as image:
        assert image.width > 800
    log, drawn = Path("t", LINES), len(turns)
    lines = log.read_text().splitlines(keepends=True)
    assert len(lines) == drawn == 2 * 2 * 2
    log.write_text("".join(lines[:-1]) + lines[-1][:20])
    again = json.loads(run(*requested).out)
    assert len(turns) == drawn + 1 and len(again["rates"]) == 6
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = run(*requested[:-1]).out
    assert len(turns) == drawn + 1 and "fitted" in shown and "chain-3" in shown
    assert run(*requested[:-1], "--no-plots", "--restart").code == 0 and len(turns) == 2 * drawn + 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--batch-sizes", "1,x"), "'1,x'"),
        (("--batch-sizes", "0,2"), "'0,2'"),
        (("--batch-sizes", ""), "''"),
        (("--batch-size", 2), "--batch-sizes"),
        (("--measure-tv",), "bench --measure-tv"),
        (("--rounds", 0), "--rounds 0"),
        (("--prompts", "absent.txt"), "absent.txt"),
        (("--tree", "chain-99"), "chain-99"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, own, options, named):
    outcome = run("throughput", "--model", own, *SMALL, *options)
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and named in outcome.err
    assert not Path("t").exists()
