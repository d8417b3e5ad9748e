"""Running uvicorn: limits on connections that it has not, and shutting down, where accepted pictures are finished while new requests get 503.

uvicorn itself closes idle connections, limits the headers of a request to 64 KiB (with h11, not with httptools, its other
parser) and reads no more of a body than the app takes. How slowly a client may send and read, and who leaves where there are
too many, is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lanternpp.errors import InputError

log = logging.getLogger("lanternpp.serve")
SPARE = 64  # open files other than connections
LOG_INTERVAL = 60.0  # least seconds between two log lines with the same message
GRACEFUL_SECONDS = 5  # for writing the last answers after drawing has ended


@dataclass
class Limits:
    """Limits on connections, in seconds and bytes."""

    connections: int = 1000
    request: float = 20.0  # from a request's first byte to its last, and until the first one's first byte
    idle: float = 30.0  # between two requests
    stalled: float = 30.0  # in which a client reads nothing of an answer
    early: int = 1 << 16  # bytes that a client may send while its request is being answered

    def __post_init__(self) -> None:
        self._logged: dict[str, float] = {}  # message -> time.monotonic() when it was logged

    def warn(self, message: str) -> None:
        """Log a message at most once a minute, so that no client can fill the log."""
        now = time.monotonic()
        if now - self._logged.get(message, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged[message] = now
            log.warning("%s; logged at most once a minute", message)


def raise_soft_limit(connections: int) -> int:
    """Raise the process's limit on open files for so many connections; returns how many it can have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + SPARE
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - SPARE))


class Connection(H11Protocol):
    """A connection that is closed when its client exceeds the limits of its subclass.

    Where there are too many connections, the one that has waited longest for its client is closed. So clients that send
    whole requests are answered, however many others hold connections open.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None  # runs while a request is incomplete
        self._waiting_since: float | None = None  # loop time; None: its client waits for the server
        self._early = 0  # bytes that came while a request was answered
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client reads too slowly

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._close_longest_waiting()
        self._update_timer()

    def _close_longest_waiting(self) -> None:
        most = self.limits.connections
        self.limits.warn(f"all {most} connections are in use; the one that waits longest is closed")
        others = [other for other in self.connections if isinstance(other, Connection)]
        waiting = [other for other in others if other._waiting_since is not None]
        min(waiting, key=lambda other: other._waiting_since or 0, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request.

        A request that is sent while the one before it is being answered is discarded, and the connection closed after the
        answer: reading has to go on, since only reading notices that the client has disconnected.
        """
        if not self._answering:
            super().data_received(data)
            self._update_timer()
            data = self.conn.trailing_data[0]
        if data and self._answering:
            self.cycle.keep_alive = False
            self.flow.resume_reading()
            self._early += len(data)
            if self._early > self.limits.early:
                self.transport.abort()

    @property
    def _answering(self) -> bool:
        """Whether a request has come in full and is not answered yet."""
        read = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return read and self.cycle is not None and not self.cycle.response_complete

    def _update_timer(self) -> None:
        """Start to wait for the rest of a request, or stop waiting where it is complete."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
        elif self._timer is None:
            self._waiting_since = self.loop.time()
            self._timer = self.loop.call_later(self.limits.request, self._time_out)

    def _stop_waiting(self) -> None:
        self._waiting_since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        """The client took too long to send. One that has sent nothing gets no answer, as it may be about to send."""
        begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            within = f"within {self.limits.request:g} s"
            self.limits.warn(f"a client did not send its request {within}")
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            start = h11.Response(status_code=408, headers=headers)
            for event in (
                start,
                h11.Data(data=f"the request did not come {within}".encode()),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request; uvicorn closes the connection where it stays idle."""
        super().on_response_complete()
        self._waiting_since = self.loop.time()

    def pause_writing(self) -> None:
        """The client reads more slowly than is sent: start checking that it reads at all."""
        super().pause_writing()
        self._check_reading()

    def _check_reading(self, before: float = math.inf) -> None:
        """Close the connection if the client has read nothing since so many bytes of the answer were unsent; else check again."""
        unsent = self.transport.get_write_buffer_size()
        if unsent >= before:
            self.limits.warn(f"a client read nothing of its answer for {self.limits.stalled:g} s")
            self.transport.abort()
        else:
            self._write_timer = self.loop.call_later(self.limits.stalled, self._check_reading, unsent)

    def resume_writing(self) -> None:
        """The client has read enough, or its connection has ended."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of a connection that has ended."""
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)


def configured(app: ASGIApp, proxies: Sequence[str] = (), limits: Limits | None = None) -> uvicorn.Config:
    """The configuration of uvicorn for an app. proxies: addresses or networks whose X-Forwarded-For is trusted."""
    limits = limits or Limits()
    limits.connections = raise_soft_limit(limits.connections)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=int(limits.idle),
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address; uvicorn listens on it later. port 0: any free one. Raises InputError."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InputError(f"--host {host!r} is no address of this machine: {error.strerror}") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(
            f"port {port} of {host} cannot be used ({reason}); stop what uses it, or give another --port"
        ) from None


def url(bound: socket.socket) -> str:
    """The URL at which a browser on this machine reaches the server."""
    host, port = bound.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    app: ASGIApp,
    backend: Any,
    bound: socket.socket,
    drain: float,
    ready: Callable[[], None],
    proxies: Sequence[str] = (),
) -> bool:
    """Serve until SIGTERM or SIGINT; `ready` is called once requests are answered.

    backend: draws the app's pictures: a `Batcher`, or what has its `broken` and `close`.

    After the signal, accepted pictures have `drain` seconds to finish and new requests get 503. After a second one they
    get 503 too, and a third ends the server without answers. Returns whether all accepted pictures were finished. If the
    backend breaks, the server ends and its error is raised, so that a supervisor can start a new process.
    """
    finished = True

    class Server(uvicorn.Server):
        """uvicorn, except that it keeps listening while the backend drains."""

        signals = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Call `ready` once uvicorn has started."""
            await super().startup(sockets)
            if self.started:
                ready()

        async def on_tick(self, counter: int) -> bool:
            """Ten times a second: whether to stop."""
            return await super().on_tick(counter) or backend.broken is not None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Drain at the first signal, give up what is being drawn at the second, end at the third."""
            nonlocal finished
            finished = False  # until `drain` says otherwise
            self.signals += 1
            if self.signals > 2:
                self.should_exit = self.force_exit = True
            else:
                seconds = drain if self.signals == 1 else 0
                threading.Thread(
                    target=self.drain, args=(seconds,), name="lanternpp-drain", daemon=True
                ).start()

        def drain(self, seconds: float) -> None:
            """Let the backend finish, then stop uvicorn, which sends the last answers."""
            nonlocal finished
            try:
                # a first drain that a second signal has cut short finds nothing left to draw
                finished = backend.close(True, seconds) and self.signals == 1
            finally:
                self.should_exit = True

    try:
        Server(configured(app, proxies)).run(sockets=[bound])
    finally:
        backend.close(False, 0)
    if backend.broken is not None:
        raise backend.broken
    return finished
