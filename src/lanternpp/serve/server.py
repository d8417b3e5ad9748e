"""Running uvicorn with limits on connections, and shutting down: accepted pictures are finished while new requests get 503.

uvicorn itself closes idle connections, limits the headers of a request to 64 KiB (with h11, not with httptools, its other
parser) and reads no more of a body than the app takes. This module limits how slowly a client may send and read, and closes
a connection where there are too many.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lanternpp.errors import InputError
from lanternpp.serve.error_responses import error_response, response_for
from lanternpp.serve.tickets import closed

if sys.platform != "win32":
    import resource

log = logging.getLogger("lanternpp.serve")
OTHER_FILES = 64  # open files other than connections
# asyncio accepts up to this many connections at once, before one can be closed: more could take all files that are left.
ACCEPTED_AT_ONCE = 8
QUEUE = 2048  # connections that the kernel holds until they are accepted
WATCH_SECONDS = 1.0  # between two looks at how slow a client is
LOG_INTERVAL = 60.0  # minimum seconds between two log lines with the same message
GRACEFUL_SECONDS = 5  # for writing the last responses after drawing has ended


@dataclass
class Limits:
    """Limits on connections, in seconds and bytes."""

    connections: int = 1000
    request: float = 20.0  # from connecting, or from the first byte of a later request, to its last byte
    idle: float = 30.0  # between two requests
    stalled: float = 30.0  # in which a client reads nothing of a response
    early: int = 1 << 16  # bytes that a client may send while its request is being answered
    _logged: dict[str, float] = field(default_factory=dict, init=False)  # message -> time.monotonic()

    def warn(self, message: str) -> None:
        """Log a message at most once a minute, so that no client can fill the log."""
        now = time.monotonic()
        if now - self._logged.get(message, -LOG_INTERVAL) >= LOG_INTERVAL:
            self._logged[message] = now
            log.warning("%s; logged at most once a minute", message)


def raise_soft_limit(connections: int) -> int:
    """Raise the process's limit on open files for this number of connections; return the number that it can have."""
    if sys.platform == "win32":  # has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < num_files:
        soft = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - OTHER_FILES))


class Connection(H11Protocol):
    """A connection that is closed when its client exceeds the limits of its subclass.

    Where there are too many connections, one that waits for its client is closed. So clients that send
    whole requests are answered, however many connections are held open.
    """

    limits = Limits()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        # Loop times by which the client must have sent its request, and read something of its answer.
        self._request_due = self._read_due = math.inf
        self._unsent = math.inf  # bytes of the answer, the last time that the client had read some
        self._early_bytes = 0  # received while a request was being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._update_request()
        self._watch()
        if len(self.connections) > self.limits.connections:
            self._make_room()

    @property
    def _deadline(self) -> float:
        """The loop time at which the connection is closed if nothing comes; infinite where the client waits for the server."""
        timer = self.timeout_keep_alive_task
        return min(self._request_due, self._read_due, timer.when() if timer else math.inf)

    def _make_room(self) -> None:
        """Close the connection whose time ends first; this one where all other clients wait for the server."""
        limit, connections = self.limits.connections, cast("set[Connection]", self.connections)
        # Closed connections leave `connections` later, after others may have come.
        remaining = [connection for connection in connections if not connection._is_closed]
        if len(remaining) > limit:
            self.limits.warn(f"all {limit} connections are in use; the one that waits longest is closed")
            min([self, *remaining], key=lambda connection: connection._deadline).transport.abort()

    @property
    def _is_closed(self) -> bool:
        """Whether the connection was closed, and its client has received everything."""
        return self.transport.is_closing() and not self.transport.get_write_buffer_size()

    def data_received(self, data: bytes) -> None:
        """Receive bytes of a request.

        A request that is sent while the previous one is being answered is discarded, and the connection closed after the
        response. Reading goes on meanwhile, since only reading notices that the client has disconnected.
        """
        if not self._answering:
            super().data_received(data)
            self._update_request()
            data = self.conn.trailing_data[0]
        if data and self._answering:
            self.cycle.keep_alive = False
            self.flow.resume_reading()
            self._early_bytes += len(data)
            if self._early_bytes > self.limits.early:
                self.transport.abort()

    @property
    def _answering(self) -> bool:
        """Whether a request was received in full and is not answered yet."""
        received = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return received and self.cycle is not None and not self.cycle.response_complete

    def _update_request(self) -> None:
        """Start to wait for the rest of a request, or stop waiting where the request is complete."""
        incomplete = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        has_begun = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
        if not (incomplete and has_begun):
            self._request_due = math.inf
        if incomplete:
            self._request_due = min(self._request_due, self.loop.time() + self.limits.request)

    def _watch(self) -> None:
        """Close the connection of a slow client; else look again in a second."""
        unsent = self.transport.get_write_buffer_size()
        # Nothing more is written in these states, so the number of unsent bytes falls where the client reads.
        waits = self.flow.write_paused or self.transport.is_closing() or not self._answering
        if not (unsent and waits):
            self._unsent = self._read_due = math.inf
        elif unsent < self._unsent:
            self._unsent, self._read_due = unsent, self.loop.time() + self.limits.stalled
        if self._deadline <= self.loop.time():
            self._time_out()
        self._watcher = self.loop.call_later(WATCH_SECONDS, self._watch)

    def _time_out(self) -> None:
        """Close the connection of a slow client. A client that has sent nothing gets no 408, as it may be about to send."""
        if self._read_due <= self.loop.time():
            self.limits.warn(f"a client read nothing of its answer for {self.limits.stalled:g} s")
            self.transport.abort()
        elif self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            limit = f"within {self.limits.request:g} s"
            self.limits.warn(f"a client did not send its request {limit}")
            self._reject(
                error_response(408, f"the request did not come {limit}", "timeout", Connection="close")
            )
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once its response is sent. A request that is still incomplete gets 503 now."""
        super().shutdown()
        if self.conn.their_state is h11.SEND_BODY:
            self._reject(response_for(closed()))
            self.transport.close()

    def _reject(self, response: Response) -> None:
        """Answer a request that is not complete, unless it was answered before."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            start = h11.Response(status_code=response.status_code, headers=response.raw_headers)
            for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    def resume_writing(self) -> None:
        """Write again, as the client has read enough."""
        super().resume_writing()
        self._unsent = self._read_due = math.inf

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching a connection that has ended."""
        self._watcher.cancel()
        super().connection_lost(exc)


def uvicorn_config(app: ASGIApp, proxies: Sequence[str] = (), limits: Limits | None = None) -> uvicorn.Config:
    """Return the configuration of uvicorn for an app. proxies: addresses or networks whose X-Forwarded-For is trusted."""
    limits = limits or Limits()
    limits.connections = raise_soft_limit(limits.connections)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        backlog=ACCEPTED_AT_ONCE,
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
    """Bind a socket to this address, on which uvicorn listens later. port 0: any free port. Raises InputError."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise InputError(f"--host {host!r} is no address of this machine: {error.strerror}") from None
    dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=dualstack)
    except OSError as error:
        reason = (error.strerror or "").partition(" (while")[0]
        raise InputError(
            f"port {port} of {host} cannot be used ({reason}); stop what uses it, or give another --port"
        ) from None


def url(bound: socket.socket) -> str:
    """Return the URL at which a browser on this machine reaches the server."""
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

    backend: draws the app's pictures: a `Batcher`, or another object with its `broken` and `close`.

    After the signal, accepted pictures have `drain` seconds to finish and new requests get 503. After a second signal accepted
    pictures get 503 too, and a third one ends the server without responses. Returns whether all accepted pictures were finished.
    If the backend breaks, the server ends and the error is raised, so that a supervisor can start a new process.
    """
    finished = False

    class Server(uvicorn.Server):
        """uvicorn, except that it keeps listening while the backend drains."""

        signals = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Call `ready` once uvicorn has started."""
            await super().startup(sockets)
            if self.started:
                bound.listen(QUEUE)  # uvicorn has set the backlog
                ready()

        async def on_tick(self, counter: int) -> bool:
            """Return whether to stop; uvicorn calls this ten times a second."""
            return await super().on_tick(counter) or backend.broken is not None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Drain at the first signal, abandon accepted pictures at the second, end at the third."""
            self.signals += 1
            if self.signals > 2:
                self.should_exit = self.force_exit = True
            else:
                seconds = drain if self.signals == 1 else 0
                threading.Thread(
                    target=self.drain, args=(seconds,), name="lanternpp-drain", daemon=True
                ).start()

        def drain(self, seconds: float) -> None:
            """Let the backend finish, then stop uvicorn, which sends the last responses."""
            nonlocal finished
            try:
                finished = backend.close(True, seconds)
            finally:
                self.should_exit = True

    try:
        Server(uvicorn_config(app, proxies)).run(sockets=[bound])
    finally:
        backend.close(False, 0)
    if backend.broken is not None:
        raise backend.broken
    return finished
