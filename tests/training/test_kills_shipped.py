"""Ctrl-C and a kill in the middle of `tune` and `train` on the shipped model: nothing is half-written, and the same command goes on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.killed import check_files, measured

from lanternpp.api.model import ASSETS
from lanternpp.nn import checkpoints

COMMANDS = {
    "tune": "tune --method lantern++ --prompts mine --nodes 3 --depth 2 --rounds 1 --trials 4 -n 1 --no-plots --no-save",
    "train": "train --model copy --self --prompts mine --samples 4 --sample-batch 2 --kind parallel --levels 3 --warmup 2 "
    "--checks 1 --save-minutes 0 --steps 3 --batch-size 2 -o trained",
}
BEGUN = {"tune": "**/trials.jsonl", "train": "trained/**/state.pt"}  # what is there once it is at work
# a shell's background ignores Ctrl-C
RUN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from lanternpp.cli import main; main()"


@pytest.mark.parametrize(
    ("name", "how"), [("tune", signal.SIGINT), ("tune", signal.SIGKILL), ("train", signal.SIGINT)]
)
def test_an_end_in_the_middle_loses_nothing_that_was_written(name: str, how: int, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("red tulip\na tulip\n")
    shutil.copytree(ASSETS / "nature-128", tmp_path / "copy")  # trainings write beside their model
    command = [sys.executable, "-c", RUN, *COMMANDS[name].split()]
    shared = {"cwd": tmp_path, "text": True, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **shared)
    while not any(path.stat().st_size for path in tmp_path.glob(BEGUN[name])):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    process.send_signal(how)
    said = process.communicate()[1]
    check_files(tmp_path)
    if how == signal.SIGINT:
        assert process.returncode == 130 and "Traceback" not in said, said
        assert re.search("interrupted|stopped at step .* resumes it", said), said
    else:
        assert process.returncode == -signal.SIGKILL
    lines = measured(tmp_path)
    last = subprocess.run(command, capture_output=True, check=False, **shared)
    assert last.returncode == 0, last.stderr
    check_files(tmp_path)
    assert set(lines) <= set(measured(tmp_path))
    if name == "train":
        assert checkpoints.load(tmp_path / "trained")[1]
