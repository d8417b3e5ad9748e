"""Connections that are slow, many or endless: a real server lets those in that ask as others do."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest
from helpers.processes import until
from helpers.served import AUTHORIZED, IMAGES, KEY, SlowPipe, app_of, dial, listening, request, serving

from lanternpp.serve.config import ServerConfig
from lanternpp.serve.connections import Limits

SHORT = {"request": 1.5, "idle": 1.5, "stalled": 1.5}  # seconds, in which a test sends its own requests


@contextmanager
def slowly(
    limits: Limits, proxies: tuple[str, ...] = (), **config: object
) -> Iterator[tuple[SlowPipe, object, str]]:
    """A pipeline of slow engines, its batcher and the address."""
    pipe, config = SlowPipe(), ServerConfig("ar", **config)
    with app_of(pipe, config, limits=limits, proxies=proxies, slots=1, queue=8) as (batcher, address):
        yield pipe, batcher, address
        pipe.allow()


def received(line: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    said = bytearray()
    try:
        while part := line.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    return bytes(said)


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"HTTP/1.1 408 "),
        (request()[:-3], b"HTTP/1.1 408 "),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 "),  # and no more
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /hea", b"HTTP/1.1 200 "),
    ],
)
def test_who_sends_no_whole_request_is_not_waited_for(sent: bytes, answer: bytes) -> None:
    with slowly(Limits(**SHORT)) as (_, _, address), dial(address) as line:
        line.sendall(sent)
        said = received(line)
        assert said.startswith(answer) and (said == b"") == (answer == b"")
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_a_byte_now_and_then_buys_no_time(caplog: pytest.LogCaptureFixture) -> None:
    with slowly(Limits(**SHORT)) as (_, _, address), dial(address) as line:
        line.settimeout(0.05)
        end = time.monotonic() + 60
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        while time.monotonic() < end:
            try:
                line.sendall(b"x")
                said = line.recv(100)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                said = b"HTTP/1.1 408 "
                break
        assert said.startswith(b"HTTP/1.1 408 ")
        assert "did not send its request within 1.5 s" in caplog.text


def test_a_request_that_is_drawn_is_waited_for() -> None:
    with slowly(Limits(**SHORT)) as (pipe, batcher, address), dial(address) as line:
        line.sendall(request())
        until(lambda: batcher.load.running == 1)
        time.sleep(2.5)  # longer than it may take to ask
        pipe.allow()
        assert line.recv(100).startswith(b"HTTP/1.1 200 ")


def test_who_sends_requests_is_let_in_however_many_hold_connections_open(caplog) -> None:
    with slowly(Limits(connections=10)) as (pipe, batcher, address), ExitStack() as ends:
        drawn = ends.enter_context(dial(address))
        drawn.sendall(request())
        until(lambda: batcher.load.running == 1)
        for _ in range(30):
            ends.enter_context(dial(address)).sendall(b"GET / HTTP/1.1\r\nX: ")
            assert httpx.get(f"{address}/healthz").status_code == 200
        pipe.allow()
        assert drawn.recv(100).startswith(b"HTTP/1.1 200 "), "its request was whole"
        assert caplog.text.count("all 10 connections are in use") == 1


def test_who_takes_nothing_of_an_answer_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async def large(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        await send({"type": "http.response.body", "body": b"fine"})

    with listening(large, Limits(**SHORT)) as address, dial(address) as line:
        line.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: "read nothing of its answer" in caplog.text)
        assert httpx.get(address).text == "fine"


def two_requests(line: socket.socket, pipe: SlowPipe, together: bool) -> None:
    """The second is sent while the first is drawn, or in one piece with it."""
    line.sendall(request(seed=1) + request(seed=2) if together else request(seed=1))
    until(lambda: pipe.admitted == [1])
    if not together:
        line.sendall(request(seed=2))
        time.sleep(0.1)


@pytest.mark.parametrize("together", [True, False])
def test_a_request_sent_ahead_is_not_drawn_and_the_first_ends_with_its_client(together: bool) -> None:
    with slowly(Limits()) as (pipe, batcher, address):
        with dial(address) as line:
            two_requests(line, pipe, together)
        ticket = batcher._scheduler.tickets[0]
        until(lambda: ticket.done())
        pipe.allow(1)
        until(lambda: batcher.load.running == 0)
        assert httpx.post(address + IMAGES, json={"prompt": "tulip", "deadline": 1e-9}).status_code == 504
        assert pipe.admitted == [1]


@pytest.mark.parametrize("together", [True, False])
def test_a_connection_on_which_a_request_was_sent_ahead_is_closed_after_the_answer(together: bool) -> None:
    with slowly(Limits()) as (pipe, _, address), dial(address) as line:
        two_requests(line, pipe, together)
        pipe.allow()
        said = received(line)
        assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200 ") == 1 and b'"seed":1' in said
        assert pipe.admitted == [1]


def test_nobody_sends_ahead_without_end() -> None:
    with slowly(Limits()) as (pipe, _, address), dial(address) as line:
        line.sendall(request())
        until(lambda: pipe.admitted)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                line.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    "sent",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nZ\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 300_000,
    ],
)
def test_what_is_no_request_is_refused_quietly(sent: bytes, caplog) -> None:
    with slowly(Limits(**SHORT), keys=[KEY]) as (_, _, address), dial(address) as line:
        line.sendall(sent)
        said = received(line)
        assert said.startswith(b"HTTP/1.1 4") or said == b""
        assert httpx.get(f"{address}/healthz").status_code == 200
        assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("proxies", "clients"), [((), 1), (("127.0.0.1",), 3), (("10.0.0.0/8",), 1)])
def test_only_a_named_proxy_says_who_its_clients_are(proxies: tuple[str, ...], clients: int) -> None:
    """Else one client is as many as it likes, and the turns of the others are late."""
    with slowly(Limits(), proxies) as (pipe, batcher, address), ExitStack() as ends:
        for seed in range(3):
            line = ends.enter_context(dial(address))
            line.sendall(request(seed=seed).replace(b"Host:", b"X-Forwarded-For: 9.9.9.%d\r\nHost:" % seed))
            until(lambda seed=seed: batcher.load.running + batcher.load.queued == seed + 1)
        tickets = [*batcher._scheduler.tickets, *batcher._waiting]
        assert len({ticket.spec.client for ticket in tickets}) == clients
        pipe.allow()


FEW = 256  # files that the process may open


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW // 2, FEW))


def test_a_real_process_outlives_floods_of_headers_and_of_connections(model) -> None:
    """The attack needs no key; memory does not grow, and other clients are answered meanwhile."""
    with serving(model, "--no-page", "--api-key", KEY, limit=few_files) as (process, address):

        def draw() -> None:
            body = {"prompt": "red tulip"}
            assert httpx.post(address + IMAGES, json=body, headers=AUTHORIZED, timeout=300).status_code == 200

        draw()
        before = psutil.Process(process.pid).memory_info().rss
        with ExitStack() as ends:
            flooding = []
            for _ in range(2 * FEW):
                half = ends.enter_context(dial(address))
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
