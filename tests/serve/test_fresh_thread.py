"""Only the thread that draws keeps threads of OpenMP; everything else that computes ends with what it computed."""

from __future__ import annotations

import contextvars
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.served import IMAGES, client_of

from lanternpp import Pipeline
from lanternpp.cli import main
from lanternpp.serve import server
from lanternpp.serve.fresh_thread import run_in_fresh_thread
from lanternpp.serve.pictures import half_drawn

LEFT = """
import os, time, torch
from lanternpp.serve.fresh_thread import run_in_fresh_thread
def threads(): return len(os.listdir("/proc/self/task"))
def compute(): torch.rand(10**6).exp(); return threads()
before = threads()
inside = run_in_fresh_thread(compute)
end = time.monotonic() + 60  # a thread's own end takes a moment
while threads() > before and time.monotonic() < end: time.sleep(0.01)
print(before, inside, threads(), compute())
"""


ENDLESS = """
import signal, torch
from lanternpp.serve.fresh_thread import run_in_fresh_thread
signal.signal(signal.SIGINT, signal.default_int_handler)
def endless():
    try:
        print("begun", flush=True)
        while True: torch.rand(10**6).exp()
    finally: print("ended")
try: run_in_fresh_thread(endless)
except KeyboardInterrupt: print("interrupted")
"""


def test_it_returns_raises_and_knows_the_context() -> None:
    name = contextvars.ContextVar("name", default="nobody")
    name.set("somebody")
    ran, got = run_in_fresh_thread(lambda more: (threading.current_thread(), name.get() + more), more="!")
    assert got == "somebody!" and ran is not threading.current_thread() and not ran.is_alive()
    with pytest.raises(ZeroDivisionError):
        run_in_fresh_thread(lambda: 1 / 0)


def test_it_leaves_no_thread_of_openmp() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", LEFT]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, inside, after, without = map(int, said.split())
    assert inside > before + 1 and after == before, said
    assert without > before, said  # what it spares


def test_an_interrupt_ends_what_is_aside_and_the_program_does_not_abort() -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[0] == "ended\ninterrupted\n"
    assert process.returncode == 0


class Calls:
    """The threads in which a function was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str):
        self.threads: list[threading.Thread] = []
        call = getattr(owner, name)

        def noted(*args: object, **options: object) -> object:
            self.threads.append(threading.current_thread())
            return call(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    @property
    def left(self) -> set[str]:
        """Names of those that live."""
        assert self.threads
        return {thread.name for thread in self.threads if thread.is_alive()}


def test_a_server_that_starts_has_computed_aside(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        Calls(monkeypatch, Pipeline, "from_pretrained"),
        Calls(monkeypatch, Pipeline, "new_engine"),
        Calls(monkeypatch, Pipeline, "images"),
    ]

    def run(app: object, batcher: object, *rest: object) -> bool:
        batcher.close(False, 0)
        return True

    monkeypatch.setattr(server, "run", run)
    with pytest.raises(SystemExit) as end:
        main(["serve", "--port", "0", "--model", str(model), "--device", "cpu"])
    assert end.value.code == 0
    assert [made.left for made in calls] == [set(), set(), set()]


def test_requests_compute_aside(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    read, drawn = Calls(monkeypatch, pipe.target, "prompt"), Calls(monkeypatch, pipe, "images")
    with client_of(pipe) as http:
        body = {"prompt": "red tulip", "stream": True, "partial_images": 2}
        assert "completed" in http.post(IMAGES, json=body).text
        half_drawn(pipe, torch.arange(5))
        assert drawn.left == {"lanternpp-batcher"}
        assert read.left == set()  # the thread that draws reads no prompt
