"""A job on a real local Ray that is killed, or one of its workers: every picture once, with the bytes of a run without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.models import contents, write_model
from helpers.processes import LANTERNPP, SECONDS, descendants, lower_priority, running, wait_until

from lanternpp.cli import main

PROMPTS = "red tulip\na tulip\nthe tulip\n"


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job of 60 pictures of 64 codes."""
    place = tmp_path_factory.mktemp("jobs")
    (place / "p.txt").write_text(PROMPTS)
    given = ["--prompts", str(place / "p.txt"), "-n", "20", "--batch-size", "2", "--json"]
    return [*given, "--model", str(write_model(place / "tiny", grid=8))]


@pytest.fixture(scope="module")
def expected(args: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the job leaves without Ray."""
    out = tmp_path_factory.mktemp("plain") / "plain"
    with pytest.raises(SystemExit) as end:
        main(["generate", *args, "-o", str(out)])
    assert end.value.code == 0
    return contents(out)


@contextmanager
def begun(args: list[str], out: Path, actors: int) -> Iterator[subprocess.Popen[str]]:
    """The job on Ray with so many workers, once it has written some pictures."""
    job = [*LANTERNPP, "generate", *args, "-o", str(out), "--ray", "--actors", str(actors)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(job, stdout=pipe, stderr=pipe, text=True, preexec_fn=lower_priority)
    try:
        wait_until(lambda: len(list(out.glob("*.png"))) > 4 or process.poll() is not None)
        assert process.poll() is None, process.communicate(timeout=SECONDS)
        yield process
    finally:
        process.kill()


def test_a_killed_worker_loses_no_picture(
    args: list[str], expected: dict[str, bytes], tmp_path: Path
) -> None:
    with begun(args, tmp_path / "ray", 2) as process:
        os.kill(descendants(process.pid, "ray::Renderer")[0], signal.SIGKILL)
        assert len(list((tmp_path / "ray").glob("*.png"))) < 60
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert err == ""
    figures = json.loads(out)
    assert (figures["images"], figures["skipped"], figures["codes"]) == (60, 0, 60 * 64)
    assert contents(tmp_path / "ray") == expected


def test_a_killed_job_ends_its_workers_and_resumes_without_ray(
    args: list[str], expected: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with begun(args, tmp_path / "ray", 1) as process:
        workers = descendants(process.pid, "ray::Renderer")
    process.wait(SECONDS)
    assert workers
    wait_until(lambda: not any(map(running, workers)))
    drawn = contents(tmp_path / "ray")
    with pytest.raises(SystemExit) as end:
        main(["generate", *args, "-o", str(tmp_path / "ray")])
    figures = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert figures["skipped"] >= 5 and figures["images"] + figures["skipped"] == 60
    assert contents(tmp_path / "ray") == expected
    assert all(expected[name] == png for name, png in drawn.items() if name.endswith(".png"))
