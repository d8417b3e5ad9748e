"""Running uvicorn, and shutting down: accepted pictures are finished while new requests get 503."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lanternpp.errors import InputError
from lanternpp.serve.connections import Connection, Limits, raise_soft_limit

GRACEFUL_SECONDS = 5  # for writing the last answers after drawing has ended


def configured(app: ASGIApp, proxies: Sequence[str] = (), limits: Limits | None = None) -> uvicorn.Config:
    """The configuration of uvicorn for an app. proxies: addresses or networks whose X-Forwarded-For is trusted."""
    limits = limits or Limits()
    limits.connections = raise_soft_limit(limits.connections)
    return uvicorn.Config(
        app,
        http=type("LimitedConnection", (Connection,), {"limits": limits}),
        ws="none",
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
