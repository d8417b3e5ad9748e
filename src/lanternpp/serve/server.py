"""The process: uvicorn, and an end in which accepted requests finish and new ones hear that it is over."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from lanternpp.serve.connections import Limits, connection, raise_soft_limit

LAST_WORDS = 5  # seconds in which answers may still be written once nothing is drawn any more


def configured(app: ASGIApp, proxies: Sequence[str] = (), limits: Limits | None = None) -> uvicorn.Config:
    """How uvicorn serves an app. proxies: whose X-Forwarded-For is believed; nobody's unless they are named."""
    limits = limits or Limits()
    limits.connections = raise_soft_limit(limits.connections)
    return uvicorn.Config(
        app,
        http=connection(limits),
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=int(limits.idle),
        timeout_graceful_shutdown=LAST_WORDS,
    )


class Drawing(Protocol):
    """What draws behind an app: a batcher, or several elsewhere."""

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""

    @property
    def broken(self) -> Exception | None:
        """Why it ended by itself; None: it did not."""

    def close(self, drain: bool, timeout: float) -> bool:
        """End it, at once or within so many seconds; whether all that was accepted was finished."""


def run(
    app: ASGIApp,
    batcher: Drawing,
    bound: socket.socket,
    drain: float,
    ready: Callable[[], None],
    proxies: Sequence[str] = (),
) -> bool:
    """Serve until SIGTERM or SIGINT; `ready` is called once requests are answered.

    From the signal on, accepted orders have `drain` seconds to finish and new ones get 503. A second signal ends it
    at once. Returns whether all that was accepted was finished. Where the batcher ends by itself so does the server,
    and its error is raised: whatever supervises the process starts a fresh one.
    """
    finished = True

    class Server(uvicorn.Server):
        """uvicorn, except that it keeps listening while the batcher drains."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """As ever, then say so."""
            await super().startup(sockets)
            if self.started:
                ready()

        async def on_tick(self, counter: int) -> bool:
            """Ten times a second: whether to stop."""
            return await super().on_tick(counter) or batcher.broken is not None

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """The first signal drains, the second ends."""
            if batcher.closed:
                self.should_exit = self.force_exit = True
            else:
                nonlocal finished
                finished = False  # until they are
                threading.Thread(target=self.drain, name="lanternpp-drain", daemon=True).start()

        def drain(self) -> None:
            """Let the batcher finish, then uvicorn stop."""
            nonlocal finished
            finished = batcher.close(True, drain)
            self.should_exit = True

    try:
        Server(configured(app, proxies)).run(sockets=[bound])
    finally:
        batcher.close(False, 0)
    if batcher.broken is not None:
        raise batcher.broken
    return finished
