"""What strangers sent to the page and hung or filled the server with, against a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.served import serving, until

IMAGES = "/v1/images/generations"
RACE = {"prompt": "a red tulip", "stream": True, "progress": True, "n": 2}
LARGE = "x" * 900_000
MEBIBYTE = 1 << 20

# Paths at which other web frameworks of pages take jobs, files and addresses.
QUEUES = ("/queue/join", "/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/call/race")
UPLOADS = ("/upload", "/gradio_api/upload", "/gradio_api/stream/x", "/gradio_api/component_server")
FILES = (
    "/gradio_api/file=/etc/hostname",
    "/file=/etc/hostname",
    "/gradio_api/proxy=http://127.0.0.1/",
    "/static/x",
)
FILES += (
    "/config",
    "/gradio_api/info",
    "/gradio_api/queue/data?session_hash=a",
    "/gradio_api/heartbeat/a",
    "/theme.css",
)


@pytest.fixture(scope="module")
def running(long_model: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server with its page; it must end by itself in the end, with nothing in its log."""
    with serving(long_model, "--queue", "16") as (process, address):
        with httpx.Client(base_url=address, timeout=60) as http:
            yield process, http
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert process.stderr.read() == ""


def idle(http: httpx.Client) -> bool:
    """Whether nothing is drawn and nothing waits."""
    state = http.get("/healthz").json()
    return (state["status"], state["running"], state["queued"]) == ("ok", 0, 0)


@pytest.mark.parametrize("named", ["/dev/zero", "/etc/shadow", "/proc/self/environ", "http://127.0.0.1:1/x"])
def test_no_request_names_a_file_or_an_address(running, named: str) -> None:
    _, http = running
    file = {"path": named, "url": named, "meta": {"_type": "gradio.FileData"}}
    join = {"fn_index": 6, "session_hash": "a", "data": [file] * 17}
    for path in (*QUEUES, *UPLOADS):
        assert http.post(path, json=join).status_code == 404, path
        assert http.post(path, files={"files": b"x"}).status_code == 404, path
    for path in FILES:
        assert http.get(path).status_code == 404, path
    assert http.post("/page/setup", json=join).status_code == 405
    assert http.post(IMAGES, json=join).status_code == 400
    for field in ("prompt", "model", "method", "tree", "size", "seed", "n", "cfg", "measure_tv", "user"):
        for value in (file, [file], named) if field not in ("prompt", "user") else (file, [file]):
            answer = http.post(IMAGES, json=RACE | {field: value})
            assert 400 <= answer.status_code < 500, (field, value)
            assert "root:" not in answer.text and "PATH=" not in answer.text
    assert idle(http)


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


def abandoned(address: httpx.URL) -> None:
    """A race that is begun and never read: its connection is closed after the head of the answer."""
    body = json.dumps(RACE).encode()
    with socket.create_connection((address.host, address.port), timeout=60) as line:
        line.sendall(b"POST %s HTTP/1.1\r\nHost: %s\r\n" % (IMAGES.encode(), address.host.encode()))
        line.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert line.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 429")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read in /proc")
def test_memory_stays_flat_over_many_that_join_and_leave(running) -> None:
    process, http = running

    def join(_: int) -> None:
        abandoned(http.base_url)
        body = RACE | {"session_hash": LARGE}
        assert http.post(IMAGES, json=body).status_code == 400
        assert http.post(QUEUES[1], json=body).status_code == 404
        assert http.post(IMAGES, json=RACE | {"user": LARGE}).status_code == 400

    with ThreadPoolExecutor(4) as crowd:
        list(crowd.map(join, range(20)))  # what is allocated once
        until(lambda: idle(http))
        before = resident(process)
        list(crowd.map(join, range(60)))
        until(lambda: idle(http))  # nobody reads these: they were given up, not drawn
    assert resident(process) - before < 32 * MEBIBYTE, "180 bodies of 0.9 MB came meanwhile, and 60 races"
    drawn = [line for line in http.get("/metrics").text.splitlines() if 'outcome="cancelled"' in line]
    assert drawn, "a race whose reader left is cancelled"
