"""Hostile requests to a server process: no 5xx, no hang, no traceback, no file, and constant memory."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import psutil
from helpers.processes import wait_until
from helpers.served import IMAGES, serving

from lanternpp.serve.config import EDITS
from lanternpp.serve.metrics import ROUTES
from lanternpp.serve.schemas import ImagesRequest

STREAMED = {"prompt": "a red tulip", "stream": True, "progress": True, "n": 2}
LARGE = "x" * 900_000
MEBIBYTE = 1 << 20

# Parts of random requests.
PATHS = [*ROUTES, "/", "/v1", "/v1/models/tiny", "/docs", "/.."]
PARTS = ["%2e%2e", "%00", "//", "?x=", "#", "%c3%a9", "%ff", "etc/passwd", "\\", ";", "a" * 2000]
HTTP_METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "NONSENSE"]
JSON = "application/json"
KINDS = [JSON, "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""]
FIELDS = [*ImagesRequest.model_fields, "unknown"]
NUMBERS = [True, 0, 1, 2, -1, 10, 255, 2**31, 2**62, 2**63, 10**400, 0.5, 1e-320, 1e-30, 1e30, 1e308, -1e308]
TEXTS = ["", "tulip", "red tulip", "\0", "\ud800", "é" * 300, "lantern++", "jacobi", "png"]
TEXTS += ["os:system", "../x", "/etc/passwd", "/proc/self/environ", "/dev/zero", "http://127.0.0.1:1/x"]
OTHERS = [None, [], [1], {}, {"path": "/etc/passwd", "url": "/dev/zero"}, [[[[]]]]]
VALUES = [*NUMBERS, *TEXTS, *OTHERS]


def idle(http: httpx.Client) -> bool:
    """Whether nothing is drawn and nothing waits."""
    state = http.get("/healthz").json()
    return (state["status"], state["running"], state["queued"]) == ("ok", 0, 0)


def resident(process: subprocess.Popen[str]) -> int:
    """Bytes of memory that a process has."""
    return psutil.Process(process.pid).memory_info().rss


def body(rng: random.Random) -> bytes:
    """The body of a request, often a wrong one."""
    if rng.random() < 0.15:
        return rng.choice([b"", b"{", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe", b"9" * 6000, b"null"])
    fields: dict[str, object] = {"prompt": "red tulip", "method": "ar", "deadline": 20}
    for field in rng.sample(FIELDS, rng.randint(0, 4)):
        fields[field] = rng.choice(VALUES)
    return json.dumps(fields).encode()


def requests(seed: int, count: int) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Random requests: method, path, body, headers."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(PATHS) + ("/" + rng.choice(PARTS) if rng.random() < 0.3 else "")
        method = "POST" if path in (IMAGES, EDITS) and rng.random() < 0.8 else rng.choice(HTTP_METHODS)
        kind = rng.choice(KINDS) if rng.random() < 0.3 else JSON
        yield method, path, body(rng) if method in ("POST", "PUT", "PATCH") else b"", {"Content-Type": kind}


def test_random_requests(model: Path) -> None:
    with serving(model, "--page", "--slots", "2", "--method", "ar") as (process, address):

        def ask(seed: int, count: int) -> None:
            with closing(HTTPConnection(address.removeprefix("http://"), timeout=120)) as http:
                for request in requests(seed, count):
                    http.request(*request)
                    answer = http.getresponse()
                    said = answer.read()
                    assert answer.status < 500 or answer.status == 504, (request, said)
                    assert b"root:" not in said and b"PATH=" not in said, request

        ask(0, 150)
        before = resident(process)
        ask(1, 250)
        assert resident(process) - before < 40 * MEBIBYTE
        process.terminate()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in said, said


def disconnect(address: httpx.URL) -> None:
    """A streamed request whose connection is closed after the head of the answer."""
    content = json.dumps(STREAMED).encode()
    with socket.create_connection((address.host, address.port), timeout=60) as line:
        line.sendall(b"POST %s HTTP/1.1\r\nHost: %s\r\n" % (IMAGES.encode(), address.host.encode()))
        line.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        assert line.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 429")


def test_memory_stays_constant_over_many_requests_and_disconnects(long_model: Path) -> None:
    with (
        serving(long_model, "--queue", "16") as (process, address),
        httpx.Client(base_url=address, timeout=60) as http,
    ):

        def send(_: int) -> None:
            disconnect(http.base_url)
            assert http.post(IMAGES, json=STREAMED | {"unknown": LARGE}).status_code == 400
            assert http.post("/queue/join", json=STREAMED | {"user": LARGE}).status_code == 404
            assert http.post(IMAGES, json=STREAMED | {"user": LARGE}).status_code == 400

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, range(20)))  # what is allocated once
            wait_until(lambda: idle(http))
            before = resident(process)
            list(pool.map(send, range(60)))
            wait_until(lambda: idle(http))  # nobody reads these: they were cancelled
        assert resident(process) - before < 32 * MEBIBYTE, (
            "180 bodies of 0.9 MB came meanwhile, and 60 streamed requests"
        )
        drawn = [line for line in http.get("/metrics").text.splitlines() if 'outcome="cancelled"' in line]
        assert drawn, "a disconnected request is cancelled"
        process.terminate()
        assert process.wait(120) == 0 and process.stderr.read() == ""
