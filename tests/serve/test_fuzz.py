"""Random requests to a real process: no 5xx, no hang, no traceback, and memory that stays where it was."""

from __future__ import annotations

import json
import random
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest
from serve.test_process import IMAGES, serving

PATHS = (
    "/",
    "/v1",
    "/v1/models",
    "/v1/models/tiny",
    IMAGES,
    "/healthz",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/..",
)
PARTS = (
    "%2e%2e",
    "%00",
    "//",
    "?x=",
    "#",
    "%c3%a9",
    "%ff",
    "etc/passwd",
    "\\",
    ";",
    "a" * 2000,
    "-",
    "routes",
    "gradio_api",
)
WAYS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "NONSENSE")
KINDS = (
    "application/json",
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "",
)
FIELDS = (
    *(
        "prompt",
        "n",
        "seed",
        "cfg",
        "temperature",
        "top_k",
        "top_p",
        "method",
        "accept",
        "neighbours",
        "delta",
        "lam",
        "nu",
    ),
    *(
        "residual",
        "window",
        "coupling",
        "init",
        "alternatives",
        "measure_tv",
        "deadline",
        "stream",
        "partial_images",
        "size",
        "user",
    ),
    *("response_format", "output_format", "output_compression", "model", "unknown"),
)
VALUES = (
    *(
        None,
        True,
        0,
        1,
        2,
        -1,
        10,
        255,
        2**31,
        2**62,
        2**63,
        10**400,
        0.5,
        1e-320,
        1e-30,
        1e30,
        1e308,
        -1e308,
    ),
    *("", "tulip", "red tulip", "\0", "\ud800", "é" * 300, "lantern++", "jacobi", "os:system", "../x", "png"),
    *([], [1], {}, {"path": "/dev/zero", "meta": {"_type": "gradio.FileData"}}, [[[[]]]]),
)


def body(chance: random.Random) -> bytes:
    """Something like a request, or not at all."""
    if chance.random() < 0.15:
        return chance.choice([b"", b"{", b"[" * 20_000, b'{"a":' * 20_000, b"\xff\xfe", b"9" * 6000, b"null"])
    fields: dict[str, object] = {"prompt": "red tulip", "method": "ar", "deadline": 20}
    for field in chance.sample(FIELDS, chance.randint(0, 4)):
        fields[field] = chance.choice(VALUES)
    return json.dumps(fields).encode()


def requests(seed: int, count: int) -> list[tuple[str, str, dict[str, str], bytes]]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        path = chance.choice(PATHS) + ("/" + chance.choice(PARTS) if chance.random() < 0.3 else "")
        way = "POST" if path == IMAGES and chance.random() < 0.8 else chance.choice(WAYS)
        headers = (
            {"Content-Type": chance.choice(KINDS)} if chance.random() < 0.3 else {"Content-Type": KINDS[0]}
        )
        found.append((way, path, headers, body(chance) if way in ("POST", "PUT", "PATCH") else b""))
    return found


@pytest.mark.parametrize("page", ["--page", "--no-page"])
def test_random_requests(model: Path, page: str) -> None:
    with serving(model, page, "--slots", "2", "--method", "ar") as (process, address):

        def ask(seed: int, count: int) -> None:
            host = address.removeprefix("http://")
            with closing(HTTPConnection(host, timeout=120)) as http:
                for way, path, headers, content in requests(seed, count):
                    http.request(way, path, content, headers)
                    answer = http.getresponse()
                    said = answer.read()
                    assert answer.status < 500 or answer.status == 504, (way, path, content, said)

        ask(0, 150)
        before = psutil.Process(process.pid).memory_info().rss
        ask(1, 250)
        assert psutil.Process(process.pid).memory_info().rss - before < 40 * 2**20
        process.terminate()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0 and "Traceback" not in said, said
