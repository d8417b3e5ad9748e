"""A job over a real local Ray, one of whose workers is killed: every picture once, and the bytes of a plain run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import write_model

from lanternpp.cli import main

COMMAND = [sys.executable, "-c", "from lanternpp.cli import main; main()", "generate"]
PROMPTS = "red tulip\na tulip\nthe tulip\n"


def descendants(pid: int) -> Iterator[int]:
    """The processes below one."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            yield int(child)
            yield from descendants(int(child))


def workers(pid: int) -> list[int]:
    """Those that draw."""
    return [
        child
        for child in descendants(pid)
        if b"ray::RenderWorker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_killed_worker_costs_no_picture(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", grid=8)
    (tmp_path / "p.txt").write_text(PROMPTS)
    args = ["--prompts", str(tmp_path / "p.txt"), "-n", "20", "--batch-size", "2", "--json"]
    args += ["--model", str(model)]
    job = [*COMMAND, *args, "--out", str(tmp_path / "ray"), "--ray", "--actors", "2"]
    process = subprocess.Popen(job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while len(list((tmp_path / "ray").glob("*.png"))) < 5:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        os.kill(workers(process.pid)[0], signal.SIGKILL)
        assert len(list((tmp_path / "ray").glob("*.png"))) < 60
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 0
    assert err == "lanternpp: warning: a worker died; another draws its unfinished pictures\n"
    figures = json.loads(out)
    assert (figures["images"], figures["skipped"], figures["codes"]) == (60, 0, 60 * 64)
    with pytest.raises(SystemExit) as end:
        main(["generate", *args, "--out", str(tmp_path / "plain")])
    assert end.value.code == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "plain")
