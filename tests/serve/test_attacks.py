"""What strangers send, against a process of its own: no 5xx, no hang, no traceback, no file, and memory that stays flat."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
import pytest
from helpers.processes import until
from helpers.served import IMAGES, serving

from lanternpp.serve.config import EDITS
from lanternpp.serve.metrics import ROUTES
from lanternpp.serve.schemas import ImagesRequest

RACE = {"prompt": "a red tulip", "stream": True, "progress": True, "n": 2}
LARGE = "x" * 900_000
MEBIBYTE = 1 << 20

# Paths at which other web frameworks of pages take jobs, files and addresses.
QUEUES = ("/queue/join", "/gradio_api/queue/join", "/gradio_api/run/predict", "/gradio_api/call/race")
UPLOADS = ("/upload", "/gradio_api/upload", "/gradio_api/stream/x", "/gradio_api/component_server")
FILES = ("/file=/etc/hostname", "/gradio_api/proxy=http://127.0.0.1/", "/static/x", "/config", "/theme.css")

# Parts of random requests.
PATHS = [*ROUTES, "/", "/v1", "/v1/models/tiny", "/docs", "/.."]
PARTS = ["%2e%2e", "%00", "//", "?x=", "#", "%c3%a9", "%ff", "etc/passwd", "\\", ";", "a" * 2000]
WAYS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "NONSENSE"]
JSON = "application/json"
KINDS = [JSON, "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""]
FIELDS = [*ImagesRequest.model_fields, "unknown"]
NUMBERS = [True, 0, 1, 2, -1, 10, 255, 2**31, 2**62, 2**63, 10**400, 0.5, 1e-320, 1e-30, 1e30, 1e308, -1e308]
TEXTS = [
    "",
    "tulip",
    "red tulip",
    "\0",
    "\ud800",
    "é" * 300,
    "lantern++",
    "jacobi",
    "os:system",
    "../x",
    "png",
]
OTHERS = [None, [], [1], {}, {"path": "/dev/zero", "meta": {"_type": "gradio.FileData"}}, [[[[]]]]]
VALUES = [*NUMBERS, *TEXTS, *OTHERS]


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


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that a process has."""
    return psutil.Process(process.pid).memory_info().rss


def body(chance: random.Random) -> bytes:
    """Something like a request, or not at all."""
    if chance.random() < 0.15:
        return chance.choice([b"", b"{", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe", b"9" * 6000, b"null"])
    fields: dict[str, object] = {"prompt": "red tulip", "method": "ar", "deadline": 20}
    for field in chance.sample(FIELDS, chance.randint(0, 4)):
        fields[field] = chance.choice(VALUES)
    return json.dumps(fields).encode()


def requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Random requests: way, path, body, headers."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(PATHS) + ("/" + chance.choice(PARTS) if chance.random() < 0.3 else "")
        way = "POST" if path in (IMAGES, EDITS) and chance.random() < 0.8 else chance.choice(WAYS)
        kind = chance.choice(KINDS) if chance.random() < 0.3 else JSON
        yield way, path, body(chance) if way in ("POST", "PUT", "PATCH") else b"", {"Content-Type": kind}


def test_random_requests(model: Path) -> None:
    with serving(model, "--page", "--slots", "2", "--method", "ar") as (process, address):

        def ask(seed: int, count: int) -> None:
            with closing(HTTPConnection(address.removeprefix("http://"), timeout=120)) as http:
                for request in requests(seed, count):
                    http.request(*request)
                    answer = http.getresponse()
                    said = answer.read()
                    assert answer.status < 500 or answer.status == 504, (request, said)

        ask(0, 150)
        before = resident(process)
        ask(1, 250)
        assert resident(process) - before < 40 * MEBIBYTE
        process.terminate()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in said, said


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


def abandoned(address: httpx.URL) -> None:
    """A race that is begun and never read: its connection is closed after the head of the answer."""
    content = json.dumps(RACE).encode()
    with socket.create_connection((address.host, address.port), timeout=60) as line:
        line.sendall(b"POST %s HTTP/1.1\r\nHost: %s\r\n" % (IMAGES.encode(), address.host.encode()))
        line.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        assert line.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 429")


def test_memory_stays_flat_over_many_that_join_and_leave(running) -> None:
    process, http = running

    def join(_: int) -> None:
        abandoned(http.base_url)
        assert http.post(IMAGES, json=RACE | {"session_hash": LARGE}).status_code == 400
        assert http.post(QUEUES[1], json=RACE | {"session_hash": LARGE}).status_code == 404
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
