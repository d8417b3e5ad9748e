"""Limits on connections: how many there may be, how much a client may send, and how slowly.

h11 is used because it limits the headers of a request to about 64 KiB; httptools, uvicorn's other parser, does not.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lanternpp.serve.error_responses import error_response

log = logging.getLogger("lanternpp.serve")
SPARE = 64  # open files other than connections
LOG_INTERVAL = 60.0  # least seconds between two log lines with the same message


@dataclass
class Limits:
    """Limits on connections, in seconds and bytes."""

    connections: int = 1000
    request: float = 20.0  # from a request's first byte to its last, and until the first one's first byte
    idle: float = 30.0  # between two requests
    stalled: float = 30.0  # in which a client reads nothing of an answer
    early: int = 1 << 16  # bytes of next requests that a client may send while one is being answered

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


def connection(limits: Limits) -> type[H11Protocol]:
    """The protocol class for uvicorn, with these limits."""

    class Limited(Connection):
        """A connection to this server."""

        bounds = limits

    return Limited


class Connection(H11Protocol):
    """A connection that is closed when its client exceeds the limits.

    Where there are too many connections, the one that has waited longest for its client is closed. So clients that send
    whole requests are answered, however many others hold connections open.
    """

    bounds = Limits()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None  # runs while it waits for its client to send
        self._since = 0.0  # loop time when that began
        self._begun = False  # whether a part of a request has come
        self._early = bytearray()  # bytes of next requests, sent while one is being answered
        self._write_timer: asyncio.TimerHandle | None = None  # runs while the client reads too slowly
        self._unsent = 0  # bytes of the answer that the client had not read at the latest check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._close_longest_waiting()
        self._wait(self.bounds.request)

    def _close_longest_waiting(self) -> None:
        self.bounds.warn(
            f"all {self.bounds.connections} connections are in use; the one that waits longest is closed"
        )
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        waiting = [other for other in others if other._timer is not None]
        min(waiting, key=lambda other: other._since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request. Bytes of a next request are kept until this one is answered; reading on notices a disconnect."""
        if self._answering:
            self._early += data
            if len(self._early) > self.bounds.early:
                self.transport.abort()
            return
        super().data_received(data)
        self._update_timer()

    @property
    def _answering(self) -> bool:
        """Whether a request has come in full and is not answered yet."""
        read = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return read and self.cycle is not None and not self.cycle.response_complete

    def _update_timer(self) -> None:
        """Set how long to wait for what the client sends next."""
        if self.conn.their_state is h11.DONE:
            self.flow.resume_reading()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
            self._begun = False
            return
        begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if not begun or not self._begun or self._timer is None:
            self._wait(self.bounds.request if begun else self.bounds.idle)
        self._begun = begun

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        """The client took too long to send."""
        self._timer = None
        if self._begun:
            self.bounds.warn(f"a client did not send its request within {self.bounds.request:g} s")
            self._refuse(408, f"the request did not come within {self.bounds.request:g} s", "timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """The bytes are not HTTP, or the headers are too long."""
        self._refuse(400, "this is not an HTTP request, or its headers are too long", "invalid_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send an error, unless the app has begun its answer, and close the connection."""
        self._stop_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error_response(status, message, code, Connection="close")
            start = h11.Response(status_code=status, headers=answer.raw_headers)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self.loop.call_later(self.bounds.stalled, self.transport.abort)

    def on_response_complete(self) -> None:
        """Handle the next request, which may have come already."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._update_timer()
        if self._early and not self._answering:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)

    def pause_writing(self) -> None:
        """The client reads more slowly than is sent: start checking that it reads at all."""
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writing(self) -> None:
        def check() -> None:
            unsent = self.transport.get_write_buffer_size()
            if unsent >= self._unsent:
                self.bounds.warn(f"a client read nothing of its answer for {self.bounds.stalled:g} s")
                self.transport.abort()
            else:
                self._unsent = unsent
                self._watch_writing()

        self._write_timer = self.loop.call_later(self.bounds.stalled, check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of a connection that has ended."""
        self._stop_waiting()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)
