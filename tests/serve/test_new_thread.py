"""Only the thread that draws keeps threads of OpenMP; everything else that computes ends with what it computed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from helpers.processes import SECONDS, kill_after_timeout
from helpers.served import IMAGES, client_of

from lanternpp import Pipeline
from lanternpp.serve.request_mapping import half_drawn

RUN = """
import os, signal, time, torch
from lanternpp.serve.new_thread import run_in_new_thread
def threads(): return len(os.listdir("/proc/self/task"))
def compute(): torch.rand(10**6).exp(); return threads()
before = threads()
inside = run_in_new_thread(compute)
end = time.monotonic() + 60  # a thread's own end takes a moment
while threads() > before and time.monotonic() < end: time.sleep(0.01)
print(before, inside, threads(), compute(), flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
def endless():
    try:
        print("begun", flush=True)
        while True: torch.rand(10**6).exp()
    finally: print("ended")
try: run_in_new_thread(endless)
except KeyboardInterrupt: print("interrupted")
"""


def test_a_new_thread_leaves_no_openmp_threads_and_can_be_interrupted() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", RUN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    with kill_after_timeout(process):
        before, inside, after, without = map(int, process.stdout.readline().split())
        assert inside > before + 1 and after == before
        assert without > before  # what it spares
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=SECONDS)[0] == "ended\ninterrupted\n"
    assert process.returncode == 0


def test_a_server_computes_in_threads_that_end(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read, and previews drawn, in threads that end; pictures in the one that stays."""
    threads: dict[str, set[threading.Thread]] = {"prompt": set(), "images": set()}

    def record(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: object, **options: object) -> object:
            threads[name].add(threading.current_thread())
            return call(*args, **options)

        monkeypatch.setattr(owner, name, recorded)

    record(pipe.target, "prompt")
    record(pipe, "images")
    with client_of(pipe) as http:
        body = {"prompt": "red tulip", "stream": True, "partial_images": 2}
        assert "completed" in http.post(IMAGES, json=body).text
        half_drawn(pipe.target, torch.arange(5))
        assert all(threads.values())
        left = {name: {each.name for each in seen if each.is_alive()} for name, seen in threads.items()}
        assert left == {"prompt": set(), "images": {"lanternpp-batcher"}}
