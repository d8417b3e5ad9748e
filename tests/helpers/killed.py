"""Processes that may be killed, or that train together, on a tiny model: states after every step, shards of a few pictures."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what an optimizer would import; here, once for all processes
from safetensors import safe_open

from helpers.processes import SECONDS, lower_priority
from lanternpp.cli import main
from lanternpp.nn.files import read_pt
from lanternpp.training import drafter, eagle, pictures, rollouts, teacher
from lanternpp.tuning import study  # noqa: F401

JOURNALS = ("trials.jsonl", "turns.jsonl")
HERE = str(Path(__file__).parents[1])
TRAIN = "train --model tiny --warmup 2 --checks 2 --save-minutes 0"
COMMANDS = {
    "own": f"{TRAIN} -o tiny/own --kind eagle --self --prompts mine --samples 12 --sample-batch 1 --cache-features --loss guided "
    "--steps 26 --batch-size 3",
    "pictures": f"{TRAIN} -o tiny/photos --data photos --steps 26 --batch-size 4",
    "rollouts": f"{TRAIN} --self --prompts mine --rollouts 12 --sample-batch 1 --drafter tiny/parallel -o tiny/next --steps 26 --batch-size 3",
    "together": f"{TRAIN} --kind eagle --self --prompts mine --samples 8 --sample-batch 4 --loss guided --noise 0 --steps 4 "
    "--batch-size 4 --device cpu",
    "tune": "tune --model tiny --prompts mine --nodes 5 --depth 3 --rounds 2 --trials 6 -n 2 --no-plots --dtype float32",
}


def start(work: Callable[..., None], *args: object) -> Any:
    """Start a process with everything imported.

    Python 3.11 and 3.12 do not pass the path of these modules to the process that forks it, so the environment has it.
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if HERE not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, *paths]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.killed", "helpers.ranks"])
    process = context.Process(target=work, args=args)
    process.start()
    return process


def exit_status(process: Any) -> int:
    """The exit status of a process of `start`, which must end."""
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, "the process did not end"
    return process.exitcode


def team_environments() -> list[dict[str, str]]:
    """The environments of two processes that work together, as torchrun gives them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [shared | {"RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""} for rank in "01"]


def run_command(
    name: str, folder: str, cpu_seconds: float | None = None, env: Mapping[str, str] = {}
) -> None:
    """Run a command in a folder; `work` then holds the seconds that it took of the processor, and `said` what it printed.

    The system ends the process after `cpu_seconds` seconds of its own time on the processor.
    """
    torch.set_num_threads(1)
    lower_priority()
    os.chdir(folder)
    sys.stderr = Path("said").open("a")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores Ctrl-C
    os.environ |= env
    os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
    eagle.SHARD_BYTES, pictures.SHARD_SIZE, pictures.BATCH_SIZE, drafter.PASSES = 1 << 14, 8, 4, 20
    teacher.DRAWN_SHARD_SIZE = rollouts.DRAWN_SHARD_SIZE = 4
    began = time.process_time()
    if cpu_seconds is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # no handler runs, as with SIGKILL
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        main(COMMANDS[name].split())
    except SystemExit as end:
        if end.code:
            sys.exit(end.code)
    Path("work").write_text(str(time.process_time() - began))


def check_files(folder: Path) -> None:
    """Check that every file with its final name is complete, and every line of a journal except the last."""
    for path in folder.rglob("*"):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                assert list(file.keys())
        elif path.suffix == ".pt":
            read_pt(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".jsonl":
            for line in path.read_text().split("\n")[:-1]:
                json.loads(line)


def journal_lines(folder: Path) -> list[str]:
    """The complete lines of all journals."""
    found = []
    for path in sorted(path for name in JOURNALS for path in folder.rglob(name)):
        text = path.read_text()
        found += [f"{path} {line}" for line in text[: text.rfind("\n") + 1].splitlines()]
    return found
