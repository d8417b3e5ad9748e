"""Limits on connections that uvicorn has not: how slowly a client may send and read, and who leaves where there are too many.

uvicorn itself closes idle connections, limits the headers of a request to 64 KiB (with h11, not with httptools, its other
parser) and reads no more of a body than the app takes.
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
        self._unsent = 0  # bytes of the answer that the client had not read at the latest check

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
        self._unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.stalled, self._check_writing)

    def _check_writing(self) -> None:
        unsent, before = self.transport.get_write_buffer_size(), self._unsent
        if unsent >= before:
            self.limits.warn(f"a client read nothing of its answer for {self.limits.stalled:g} s")
            self.transport.abort()
            return
        self._unsent = unsent
        self._write_timer = self.loop.call_later(self.limits.stalled, self._check_writing)

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        self._stop_checking()

    def _stop_checking(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of a connection that has ended."""
        self._stop_waiting()
        self._stop_checking()
        super().connection_lost(exc)
