"""Slow, many or endless connections: a real server still answers ordinary requests."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from helpers.processes import wait_until
from helpers.served import (
    AUTHORIZED,
    IMAGES,
    KEY,
    PacedPipe,
    app_of,
    connect,
    listening,
    read_all,
    request,
    serving,
)

from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.server import Limits

SHORT = {"request": 1.5, "idle": 1.5, "stalled": 1.5}  # seconds, in which a test sends its own requests


@contextmanager
def server(
    slow: PacedPipe, limits: Limits, proxies: tuple[str, ...] = (), **config: object
) -> Iterator[tuple[Batcher, str]]:
    """A batcher of one slot, and the address of its server."""
    config = ServerConfig("ar", **config)
    with app_of(slow, config, limits=limits, proxies=proxies, slots=1, queue=8) as served:
        yield served
        slow.allow()


INCOMPLETE = {  # what is sent, and how the answer begins
    b"": b"",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ": b"HTTP/1.1 408 ",
    request()[:-3]: b"HTTP/1.1 408 ",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n": b"HTTP/1.1 200 ",  # and no more
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /hea": b"HTTP/1.1 200 ",
}


def test_incomplete_requests_time_out(slow: PacedPipe) -> None:
    with server(slow, Limits(**SHORT)) as (_, address), ExitStack() as ends:
        lines = [ends.enter_context(connect(address)) for _ in INCOMPLETE]
        for line, sent in zip(lines, INCOMPLETE, strict=True):
            line.sendall(sent)
        for line, (sent, answer) in zip(lines, INCOMPLETE.items(), strict=True):
            said = read_all(line)
            assert said.startswith(answer) and (said == b"") == (answer == b""), sent
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_slow_request_times_out_although_bytes_arrive(
    slow: PacedPipe, caplog: pytest.LogCaptureFixture
) -> None:
    with server(slow, Limits(**SHORT)) as (_, address), connect(address) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")

        def refused() -> bool:
            with suppress(ConnectionError):
                line.sendall(b"x")
            return "did not send its request within 1.5 s" in caplog.text

        wait_until(refused, 60, every=0.05)


def test_a_body_after_its_answer_does_not_count_in_the_time_of_the_next_request(slow: PacedPipe) -> None:
    with server(slow, Limits(request=2.0), keys=[KEY]) as (_, address), connect(address) as line:
        line.sendall(request()[:-3])
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        time.sleep(1.5)
        line.sendall(request()[-3:])
        time.sleep(0.1)
        line.sendall(b"GET /healthz HTTP/1.1\r\n")
        time.sleep(1)
        line.sendall(b"Host: x\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 200 ")


def test_drawing_does_not_count_in_the_time_of_a_request(slow: PacedPipe) -> None:
    with server(slow, Limits(request=1.0)) as (batcher, address), connect(address) as line:
        line.sendall(request())
        wait_until(lambda: batcher.running == 1)
        time.sleep(1.5)  # longer than it may take to ask
        slow.allow()
        assert line.recv(100).startswith(b"HTTP/1.1 200 ")


def test_requests_are_answered_while_all_connections_are_held_open(slow: PacedPipe, caplog) -> None:
    with server(slow, Limits(connections=10)) as (batcher, address), ExitStack() as ends:
        drawn = ends.enter_context(connect(address))
        drawn.sendall(request())
        wait_until(lambda: batcher.running == 1)
        for _ in range(30):
            ends.enter_context(connect(address)).sendall(b"GET / HTTP/1.1\r\nX: ")
            assert httpx.get(f"{address}/healthz").status_code == 200
        slow.allow()
        assert drawn.recv(100).startswith(b"HTTP/1.1 200 "), "its request was complete"
        assert caplog.text.count("all 10 connections are in use") == 1


@pytest.mark.parametrize("chunks", [1000, 1])
def test_a_client_that_does_not_read_its_answer_times_out(
    caplog: pytest.LogCaptureFixture, chunks: int
) -> None:
    """Of a single chunk the kernel takes so much that the rest does not make the server pause."""

    async def large(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(chunks if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": True})
        await send({"type": "http.response.body", "body": b"fine"})

    with listening(large, Limits(**SHORT)) as address, socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", httpx.URL(address).port))
        line.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: "read nothing of its answer" in caplog.text)
        assert httpx.get(address).text == "fine"


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_pipelined_request_is_not_drawn(slow: PacedPipe, together: bool, leaves: bool) -> None:
    """It is sent together with the first, or while that is drawn. The client disconnects, or the answer ends the connection."""
    with server(slow, Limits()) as (batcher, address):
        with connect(address) as line:
            line.sendall(request(seed=1) + request(seed=2) if together else request(seed=1))
            wait_until(lambda: batcher.running == 1)
            (ticket,) = batcher._scheduler.tickets
            if not together:
                line.sendall(request(seed=2))
                time.sleep(0.1)
            if not leaves:
                slow.allow()
                said = read_all(line)
                assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200 ") == 1 and b'"seed":1' in said
        wait_until(ticket.done)
        slow.allow(1)
        wait_until(lambda: batcher.running == 0)
        assert httpx.post(address + IMAGES, json={"prompt": "tulip", "deadline": 1e-9}).status_code == 504
        assert slow.admitted == [1] and slow.dropped == [1] * leaves


def test_data_sent_ahead_is_limited(slow: PacedPipe) -> None:
    with server(slow, Limits()) as (_, address), connect(address) as line:
        line.sendall(request())
        wait_until(lambda: slow.admitted)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                line.sendall(b"x" * 65536)


def test_malformed_requests_are_rejected_without_a_traceback(slow: PacedPipe, caplog) -> None:
    with server(slow, Limits(**SHORT), keys=[KEY]) as (_, address):
        for sent in (
            b"\0" * 100 + b"\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZ\r\n",
        ):
            with connect(address) as line:
                line.sendall(sent)
                assert read_all(line).startswith(b"HTTP/1.1 4"), sent
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("proxies", "clients"), [((), 1), (("127.0.0.1",), 3), (("10.0.0.0/8",), 1)])
def test_forwarded_addresses_count_only_from_named_proxies(
    slow: PacedPipe, proxies: tuple[str, ...], clients: int
) -> None:
    """Otherwise a client could claim to be many, and get more turns."""
    with server(slow, Limits(), proxies) as (batcher, address), ExitStack() as ends:
        for seed in range(3):
            line = ends.enter_context(connect(address))
            line.sendall(request(seed=seed).replace(b"Host:", b"X-Forwarded-For: 9.9.9.%d\r\nHost:" % seed))
            wait_until(lambda seed=seed: batcher.running + batcher.queued == seed + 1)
        assert len({ticket.client for ticket in batcher._tickets}) == clients


FEW = 256  # files that the process may open


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW // 2, FEW))


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_process_survives_floods_of_headers_and_of_connections(uvloop: bool, model, tmp_path: Path) -> None:
    """The attack needs no key; memory does not grow, and other clients are answered meanwhile."""
    # The extra `serve` alone brings no uvloop.
    (tmp_path / "uvloop.py").write_text("raise ImportError")
    path = {} if uvloop else {"PYTHONPATH": str(tmp_path)}
    with serving(model, "--no-page", "--api-key", KEY, limit=few_files, **path) as (process, address):

        def draw() -> None:
            body = {"prompt": "red tulip"}
            assert httpx.post(address + IMAGES, json=body, headers=AUTHORIZED, timeout=300).status_code == 200

        draw()
        before = psutil.Process(process.pid).memory_info().rss
        with ExitStack() as ends:
            flooding = []
            for _ in range(2 * FEW):
                half = ends.enter_context(connect(address))
                half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                flooding.append(half)
            draw()
            for endless in flooding[-8:]:
                try:
                    for i in range(1000):
                        endless.sendall(b"X-%d: %s\r\n" % (i, b"x" * 65536))
                except ConnectionError:
                    continue
                raise AssertionError("64 MiB of headers were taken")
            draw()
        assert psutil.Process(process.pid).memory_info().rss - before < 60 * 2**20
        process.terminate()
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "connections are in use" in said and "Traceback" not in said and len(said.splitlines()) < 5
