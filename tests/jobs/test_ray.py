"""A job over a real local Ray that is killed, or one of its workers: every picture once, and the bytes of a plain run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.models import write_model
from helpers.processes import descendants, running

from lanternpp.cli import main

COMMAND = [sys.executable, "-c", "from lanternpp.cli import main; main()", "generate"]
PROMPTS = "red tulip\na tulip\nthe tulip\n"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    """A job of 60 pictures of 64 codes."""
    model = write_model(tmp_path / "tiny", grid=8)
    (tmp_path / "p.txt").write_text(PROMPTS)
    given = ["--prompts", str(tmp_path / "p.txt"), "-n", "20", "--batch-size", "2", "--json"]
    return [*given, "--model", str(model)]


@contextmanager
def begun(args: list[str], out: Path) -> Iterator[subprocess.Popen[str]]:
    """The job on Ray with two workers, once it has written some pictures."""
    job = [*COMMAND, *args, "-o", str(out), "--ray", "--actors", "2"]
    process = subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(list(out.glob("*.png"))) < 5:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        yield process
    finally:
        process.kill()


def figures_here(args: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run the job without Ray; what it reports."""
    with pytest.raises(SystemExit) as end:
        main(["generate", *args, "-o", str(out)])
    assert end.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_killed_worker_costs_no_picture(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begun(args, tmp_path / "ray") as process:
        os.kill(descendants(process.pid, "ray::RenderWorker")[0], signal.SIGKILL)
        assert len(list((tmp_path / "ray").glob("*.png"))) < 60
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert err == ""
    figures = json.loads(out)
    assert (figures["images"], figures["skipped"], figures["codes"]) == (60, 0, 60 * 64)
    figures_here(args, tmp_path / "plain", capsys)
    assert contents(tmp_path / "ray") == contents(tmp_path / "plain")


def test_a_killed_job_takes_its_workers_along_and_goes_on_without_ray(
    args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begun(args, tmp_path / "ray") as process:
        workers = descendants(process.pid, "ray::RenderWorker")
    process.wait()
    assert workers
    while any(map(running, workers)):
        time.sleep(0.1)
    drawn = contents(tmp_path / "ray")
    figures = figures_here(args, tmp_path / "ray", capsys)
    assert figures["skipped"] >= 5 and figures["images"] + figures["skipped"] == 60
    figures_here(args, tmp_path / "plain", capsys)
    whole = contents(tmp_path / "plain")
    assert contents(tmp_path / "ray") == whole
    assert all(whole[name] == png for name, png in drawn.items() if name.endswith(".png"))
