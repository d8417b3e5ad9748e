"""A kill at any moment loses at most a shard, a step or a measurement. `pytest --kills 10` kills more often."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.killed import check_files, exit_status, journal_lines, run_command, start
from helpers.models import write_model
from helpers.photos import write_photos
from helpers.processes import wait_until

from lanternpp.nn import checkpoints


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with the same model, prompts and photos."""
    one = tmp_path / "reference"
    write_model(one / "tiny")
    (one / "mine").write_text("red tulip\na tulip\n")
    for split, count in (("train", 40), ("val", 4)):
        write_photos(one / "photos" / split, count, "tulip")
    return one, Path(shutil.copytree(one, tmp_path / "killed"))


def results(folder: Path) -> dict[str, Any]:
    """The weights that were left, and what was logged on the way."""
    found: dict[str, Any] = {}
    for path in sorted((folder / "tiny").glob("*/")):
        if (path / "provenance.json").is_file():
            found |= {f"{path.name} {k}": v.tolist() for k, v in checkpoints.load(path)[1].items()}
    for log in sorted((folder / "tiny").rglob("log.jsonl")):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        found[log.parent.name] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return found


def killed(name: str, folder: Path, work: float, times: int) -> int:
    """Kill a command at random moments of its work, then let it end; return how many kills came before its end."""
    rng, ends, lines = random.Random(f"{name} {times}"), [], list[str]()
    for _ in range(times):
        process = start(run_command, name, str(folder), rng.uniform(0.1, 1.2 / times) * work)
        ends.append(exit_status(process))
        check_files(folder)
        assert set(lines) <= set(lines := journal_lines(folder)), "a measurement was lost"
    assert exit_status(start(run_command, name, str(folder))) == 0 and set(ends) <= {0, -signal.SIGPROF}
    assert set(lines) <= set(journal_lines(folder))
    check_files(folder)
    return ends.count(-signal.SIGPROF)


@pytest.mark.parametrize("name", ["own", "pictures", "rollouts", "tune"])
def test_a_command_killed_at_any_moment_resumes_to_the_same_result(
    name: str, places: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    reference, other = places
    assert exit_status(start(run_command, name, str(reference))) == 0
    times = request.config.getoption("--kills")
    work = float((reference / "work").read_text())
    count = killed(name, other, work, times)
    print(f"{name}: {count} of {times} kills met it at work, {work:.1f} s of it")
    assert count >= times / 2
    if name == "tune":  # its times differ, but not what follows from recorded ones
        reported, lines = (other / "out/tune/tiny-lantern++/tune.json"), journal_lines(other)
        before = json.loads(reported.read_text())
        exit_status(start(run_command, name, str(other)))
        assert json.loads(reported.read_text()) == before
        new = set(journal_lines(other)) - set(lines)
        assert set(lines) <= set(journal_lines(other)) and not any('"round"' in line for line in new)
        tried = before["tried"]
        # of so few nodes there may be no tree that is better than the three chains
        assert len({json.dumps(one["overrides"]) for one in tried}) == len(tried) >= 3
    else:
        expected = results(reference)
        assert len(expected) > 3 and results(other) == expected


@pytest.mark.parametrize(("name", "begun"), [("tune", "**/trials.jsonl"), ("own", "**/own/state.pt")])
def test_ctrl_c_is_one_line_and_status_130_and_the_command_resumes(
    name: str, begun: str, places: tuple[Path, Path]
) -> None:
    place, _ = places
    process = start(run_command, name, str(place))
    wait_until(lambda: any(path.stat().st_size for path in place.glob(begun)) or not process.is_alive())
    assert process.is_alive(), (place / "said").read_text()
    os.kill(process.pid, signal.SIGINT)
    status = exit_status(process)
    said, lines = (place / "said").read_text(), journal_lines(place)
    assert status == 130 and "Traceback" not in said, said
    assert re.search("interrupted|stopped at step .* resumes it", said), said
    check_files(place)
    assert exit_status(start(run_command, name, str(place))) == 0 and set(lines) <= set(journal_lines(place))
    check_files(place)
