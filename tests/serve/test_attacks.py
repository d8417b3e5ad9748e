"""What strangers send, against a process of its own: no 5xx, no hang, no traceback, no file, and memory that stays flat."""

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
from helpers.processes import until
from helpers.served import IMAGES, serving

from lanternpp.serve.config import EDITS
from lanternpp.serve.metrics import ROUTES
from lanternpp.serve.schemas import ImagesRequest

RACE = {"prompt": "a red tulip", "stream": True, "progress": True, "n": 2}
LARGE = "x" * 900_000
MEBIBYTE = 1 << 20

# Parts of random requests.
PATHS = [*ROUTES, "/", "/v1", "/v1/models/tiny", "/docs", "/.."]
PARTS = ["%2e%2e", "%00", "//", "?x=", "#", "%c3%a9", "%ff", "etc/passwd", "\\", ";", "a" * 2000]
WAYS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "NONSENSE"]
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
                    assert b"root:" not in said and b"PATH=" not in said, request

        ask(0, 150)
        before = resident(process)
        ask(1, 250)
        assert resident(process) - before < 40 * MEBIBYTE
        process.terminate()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in said, said


def abandoned(address: httpx.URL) -> None:
    """A race that is begun and never read: its connection is closed after the head of the answer."""
    content = json.dumps(RACE).encode()
    with socket.create_connection((address.host, address.port), timeout=60) as line:
        line.sendall(b"POST %s HTTP/1.1\r\nHost: %s\r\n" % (IMAGES.encode(), address.host.encode()))
        line.sendall(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        assert line.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 429")


def test_memory_stays_flat_over_many_that_join_and_leave(long_model: Path) -> None:
    with (
        serving(long_model, "--queue", "16") as (process, address),
        httpx.Client(base_url=address, timeout=60) as http,
    ):

        def join(_: int) -> None:
            abandoned(http.base_url)
            assert http.post(IMAGES, json=RACE | {"unknown": LARGE}).status_code == 400
            assert http.post("/queue/join", json=RACE | {"user": LARGE}).status_code == 404
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
        process.terminate()
        assert process.wait(120) == 0 and process.stderr.read() == ""
