"""Connections that end: limits on what a client may send, how slowly, and how many connections there may be.

h11 keeps what is sent before a request's body below 64 KiB or so, which httptools, uvicorn's other parser, does not.
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

from lanternpp.serve.refusals import refusal

log = logging.getLogger("lanternpp.serve")
SPARE = 64  # open files that are not connections
OFTEN = 60.0  # least seconds between two lines of the log on the same matter


@dataclass
class Limits:
    """What connections may take. Seconds and bytes."""

    connections: int = 1000
    request: float = 20.0  # from a request's first byte to its last, and until the first one's first byte
    idle: float = 30.0  # between two requests
    stalled: float = 30.0  # in which a client takes nothing of an answer
    early: int = 1 << 16  # bytes that a client may send while its last request is answered

    def __post_init__(self) -> None:
        self._said: dict[str, float] = {}

    def say(self, message: str) -> None:
        """A line of the log, now and then: who wants to fill the log does not."""
        now = time.monotonic()
        if now - self._said.get(message, -OFTEN) >= OFTEN:
            self._said[message] = now
            log.warning("%s; said at most once a minute", message)


def raise_soft_limit(wanted: int) -> int:
    """Let this process open so many connections, or as many as it may; how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + SPARE
    if soft != resource.RLIM_INFINITY and soft < most:
        soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - SPARE))


def connection(limits: Limits) -> type[H11Protocol]:
    """uvicorn's kind of connection, within limits."""

    class Limited(Connection):
        """A connection to this server."""

        own = limits

    return Limited


class Connection(H11Protocol):
    """A connection that waits no longer than its limits say.

    Where there are too many, the one that has waited longest for its client makes room: whoever sends whole requests is
    let in, however many others hold connections open.
    """

    own = Limits()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None  # set while it waits for its client to send
        self._since = 0.0  # when that began
        self._begun = False  # whether a part of a request is there
        self._early = bytearray()  # sent while the request before it is answered
        self._writing: asyncio.TimerHandle | None = None
        self._left = 0  # bytes of an answer that the client did not take yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It begins: wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > self.own.connections:
            self._make_room()
        self._wait(self.own.request)

    def _make_room(self) -> None:
        self.own.say(f"all {self.own.connections} connections are in use; the longest waiting one is closed")
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        waiting = [other for other in others if other._timer is not None]
        min(waiting, key=lambda other: other._since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request; those of a next one wait until this one is answered, while it is still noticed who goes."""
        if self._answering:
            self._early += data
            if len(self._early) > self.own.early:
                self.transport.abort()
            return
        super().data_received(data)
        self._look()

    @property
    def _answering(self) -> bool:
        """Whether a request is there in full, and its answer is not."""
        read = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        return read and self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """How long to wait for what comes next."""
        if self.conn.their_state is h11.DONE:
            self.flow.resume_reading()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
            self._begun = False
            return
        begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if not begun or not self._begun or self._timer is None:
            self._wait(self.own.request if begun else self.own.idle)
        self._begun = begun

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._tired)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tired(self) -> None:
        """The client took too long to send."""
        self._timer = None
        if self._begun:
            self.own.say(f"a client did not send its request within {self.own.request:g} s")
            self._refuse(408, f"the request did not come within {self.own.request:g} s", "timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or its headers are too long."""
        self._refuse(400, "this is no HTTP request, or its headers are too long", "invalid_request")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """An answer in place of the app's, where that has not begun; then the end of the connection."""
        self._stop_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = refusal(status, message, code, Connection="close")
            start = h11.Response(status_code=status, headers=answer.raw_headers)
            for event in (start, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self.loop.call_later(self.own.stalled, self.transport.abort)

    def on_response_complete(self) -> None:
        """The next request may be there already."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        self._look()
        if self._early and not self._answering:
            early, self._early = bytes(self._early), bytearray()
            self.data_received(early)

    def pause_writing(self) -> None:
        """The client takes less than is sent."""
        super().pause_writing()
        self._left = self.transport.get_write_buffer_size()
        self._watch_writing()

    def resume_writing(self) -> None:
        """The client took what was sent."""
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _watch_writing(self) -> None:
        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= self._left:
                self.own.say(f"a client took nothing of its answer for {self.own.stalled:g} s")
                self.transport.abort()
            else:
                self._left = left
                self._watch_writing()

        self._writing = self.loop.call_later(self.own.stalled, look)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ends, and all its waiting with it."""
        self._stop_waiting()
        if self._writing is not None:
            self._writing.cancel()
        super().connection_lost(exc)
