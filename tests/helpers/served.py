"""For tests of the server: a real one in this process, and a pipeline whose steps wait for the test."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn
from fastapi.testclient import TestClient
from PIL import Image

from helpers.processes import LANTERNPP, SECONDS, kill_after_timeout, lower_priority, wait_until
from lanternpp import Pipeline
from lanternpp.api.options import Settings
from lanternpp.api.settings import resolve
from lanternpp.serve.app import create_app
from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.server import Limits, bind, url, uvicorn_config
from lanternpp.serve.tickets import Ticket

PROMPT = "a red tulip"
IMAGES = "/v1/images/generations"
KEY = "correct-horse-battery"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


def settings(method: str = "ar", **overrides: object) -> Settings:
    """Of a method, for a model without defaults."""
    return resolve(method, {}, overrides)


def make_ticket(seed: int = 0, client: str = "", prompt: str = PROMPT, **more: object) -> Ticket:
    """A ticket for one picture by plain decoding."""
    return Ticket(prompt, seed, settings(), client=client, **more)


def submit_all(batcher: Batcher, tickets: list[Ticket]) -> list[Ticket]:
    """Put all of these pictures of one prompt into the queue, or none, as a request does."""
    batcher.accept(tickets)
    batcher.encode(tickets)
    return tickets


def submit(batcher: Batcher, ticket: Ticket) -> Ticket:
    """Put a picture into the queue."""
    return submit_all(batcher, [ticket])[0]


class PacedPipe:
    """A real pipeline whose engines step when a test allows it, and record admitted and dropped seeds; two seeds raise errors."""

    def __init__(self, pipe: Pipeline):
        self.pipe, self.allowed = pipe, threading.Semaphore(0)
        self.admitted: list[int] = []  # seeds
        self.dropped: list[int] = []  # seeds
        self.engines: list[Settings] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.pipe, name)

    def new_engine(self, settings: Settings, shape: object = None) -> object:
        engine = self.pipe.new_engine(settings, shape)
        self.engines.append(settings)
        admit, step, drop = engine.admit, engine.step, engine.drop
        seeds: dict[int, int] = {}  # by slot

        def admitted(slot: int, condition: str, seed: int, prompt: object = None) -> None:
            if seed == 666:
                raise RuntimeError("out of memory")
            admit(slot, condition, seed, prompt)
            seeds[slot] = seed
            self.admitted.append(seed)

        def stepped() -> None:
            assert self.allowed.acquire(timeout=SECONDS)
            if 13 in seeds.values():
                raise RuntimeError("a step broke")
            step()

        def dropped(slot: int) -> None:
            drop(slot)
            self.dropped.append(seeds.pop(slot, -1))

        engine.admit, engine.step, engine.drop = admitted, stepped, dropped
        return engine

    def allow(self, steps: int = 10_000) -> None:
        self.allowed.release(steps)


@contextmanager
def batcher_of(pipe: object, config: ServerConfig | None = None, **options: object) -> Iterator[Batcher]:
    """A batcher that is closed at the end. options: further fields of its configuration."""
    made = Batcher(pipe, replace(config or ServerConfig(), **options))
    try:
        yield made
    finally:
        if isinstance(pipe, PacedPipe):
            pipe.allow()
        made.close(drain=False, timeout=0)


def load_tiny(folder: Path) -> Pipeline:
    """The tiny model, in float32."""
    return Pipeline.from_pretrained(str(folder), device="cpu", dtype="float32", tuned=False)


@contextmanager
def listening(app: object, limits: Limits | None = None, proxies: Sequence[str] = ()) -> Iterator[str]:
    """A real server of an app on a free port of this machine; its address."""
    bound = bind("127.0.0.1", 0)
    # The kernel takes little of an answer that is not read.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(uvicorn_config(app, proxies, limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield url(bound)
    finally:
        server.should_exit = True
        thread.join(60)
        bound.close()


@contextmanager
def app_of(
    pipe: object,
    config: ServerConfig | None = None,
    page: bool = False,
    limits: Limits | None = None,
    proxies: Sequence[str] = (),
    **options: object,
) -> Iterator[tuple[Batcher, str]]:
    """A batcher of a pipeline, and the address of a real server of its app."""
    with (
        batcher_of(pipe, config, page=page, **options) as batcher,
        listening(create_app(batcher), limits, proxies) as address,
    ):
        yield batcher, address


@contextmanager
def client_of(pipe: object, config: ServerConfig | None = None, page: bool = False) -> Iterator[TestClient]:
    """A client of an app in this process, without a socket."""
    with batcher_of(pipe, config, page=page) as batcher, TestClient(create_app(batcher)) as http:
        yield http


def drawn(b64: str) -> Image.Image:
    """The picture in an answer."""
    return Image.open(io.BytesIO(base64.b64decode(b64)))


def connect(address: str) -> socket.socket:
    """A connection to a server."""
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=120)


def read_all(line: socket.socket) -> bytes:
    """Everything that is received until the server closes the connection."""
    said = bytearray()
    try:
        while part := line.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return bytes(said)


def request(**fields: object) -> bytes:
    """A request for a picture, as it is sent."""
    body = json.dumps({"prompt": "tulip", **fields}).encode()
    head = f"POST {IMAGES} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def serving(
    model: Path, *options: str, limit: Callable[[], None] | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`lanternpp serve` as a process, once it answers, and its address. limit: called first in the process."""
    command = [*LANTERNPP, "serve", "--port", "0", "--model", str(model), "--device", "cpu", *options]
    pipe, environment = subprocess.PIPE, {**os.environ, **environment}
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=environment, preexec_fn=limit or lower_priority
    )
    try:
        with kill_after_timeout(process):
            line = process.stdout.readline()
            assert line.startswith("http://"), process.stderr.read()
        yield process, line.split(": ")[0]
    finally:
        process.kill()
        process.communicate(timeout=SECONDS)
