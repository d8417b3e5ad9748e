"""Processes that a test starts: commands in an environment of their own, and what to kill. Every wait ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

# The timeout of every wait, long enough for a busy machine. pytest ends a test after 300.
SECONDS = 200
LANTERNPP = (sys.executable, "-c", "from lanternpp.cli import main; main()")
SCRIPT = """
import contextlib, io, json, sys
from lanternpp.cli import main
ended = []
for args in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as end:
            ended.append((end.code, out.getvalue(), err.getvalue()))
print(json.dumps([sys.modules["lanternpp"].__file__, ended]))
"""


def lower_priority() -> None:
    """Called first in a process that a test stops, so that on a busy machine too it is stopped before its work is done."""
    os.nice(5)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores


def python(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Python, run with these arguments to its end; what it printed. options: those of `subprocess.run`."""
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": SECONDS} | options)


@contextmanager
def kill_after_timeout(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process after `SECONDS` if the block still waits for it, so that reading its output ends."""
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def wait_until(true: Callable[[], object], seconds: float = SECONDS, every: float = 0.002) -> None:
    """Wait until a condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(every)


def run_commands(
    requested: Sequence[Sequence[str]],
    place: Path,
    executable: Path | str = sys.executable,
    env: Mapping[str, str] = os.environ,
) -> tuple[Path, list[tuple[int, str, str]]]:
    """Run commands of lanternpp in one process, in a folder; the package's file, and of each the status, stdout and stderr."""
    run = [str(executable), "-c", SCRIPT]
    done = subprocess.run(
        run, input=json.dumps(requested), capture_output=True, text=True, env=env, cwd=place, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    file, ended = json.loads(done.stdout.splitlines()[-1])
    return Path(file), ended


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


def running(pid: int) -> bool:
    """Whether a process has not ended yet."""
    return bool(command(pid))


def descendants(pid: int, name: str) -> list[int]:
    """The descendants of a process whose command contains a name."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True) if name in command(child.pid)]
