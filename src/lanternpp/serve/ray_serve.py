"""Replicas of the server over Ray Serve: each its own model and batcher, one door before all of them.

A request is one replica's from beginning to end; the two sides of a race on the page may be of two. The door is this
process's: Ray's own would answer some paths to who has no key, and has no limits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import torch
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lanternpp.cluster import LOCAL, Share, cluster, share
from lanternpp.errors import InputError
from lanternpp.serve.app import Plan
from lanternpp.serve.aside import aside
from lanternpp.serve.entrance import url
from lanternpp.serve.guard import guards
from lanternpp.serve.page import FILES
from lanternpp.serve.refusals import CODES, refusal
from lanternpp.serve.server import LAST_WORDS
from lanternpp.serve.server import run as serve_until_signal

NAME = "lanternpp"
MOST = 10_000  # requests that a replica is handed at once: its batcher says when it is full
GRACE = 10.0  # seconds that a call to all replicas may take besides what it waits for
TOLD = (  # of a request, to its replica
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server", "state"),
)

log = logging.getLogger("lanternpp.serve")


@dataclass(frozen=True)
class Opened:
    """What a replica draws with."""

    model: str
    dtype: str
    effect: str | None
    replicas: int


class Replica:
    """A server without a socket: the door hands it the requests."""

    def __init__(self, plan: Plan, threads: int):
        torch.set_num_threads(threads)
        self.batcher, self.app = plan.open(aside(plan.read))

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The messages of an answer; who stops asking for them has gone away."""
        gone, said = asyncio.Event(), asyncio.Queue[Message | None]()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self.app(scope, receive, said.put))
        answering.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                yield message
            answering.result()
        finally:
            gone.set()

    def check_health(self) -> None:
        """Ray Serve starts another replica in place of one that raises."""
        if self.batcher.broken is not None:
            raise self.batcher.broken

    async def drain(self, seconds: float) -> bool:
        """Take nothing new, finish what was accepted. Returns whether that was done in time."""
        return await asyncio.to_thread(self.batcher.close, True, seconds)

    def __del__(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.close(False, 0)


class Replicas:
    """All replicas, by their handle: as an ASGI app, and as what draws behind it."""

    broken: Exception | None = None  # one that breaks is replaced

    def __init__(self, handle: Any):
        self.handle, self.closed = handle, False

    def close(self, drain: bool, timeout: float) -> bool:
        """As `Batcher.close`; without `drain` that is left to the end of Ray Serve."""
        self.closed = True
        if not drain:
            return True
        return all(self.handle.broadcast("drain", timeout).results(timeout_s=timeout + GRACE))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to a replica, and its answer back."""
        if scope["type"] != "http":
            raise ValueError(f"no {scope['type']} here")
        try:
            body = await whole(receive)
        except HTTPException as error:
            named = {name.replace("-", "_"): value for name, value in (error.headers or {}).items()}
            told = refusal(error.status_code, error.detail, CODES.get(error.status_code), **named)
            await told(scope, receive, send)
            return
        if body is None:
            return
        request = {name: scope[name] for name in TOLD if name in scope}
        messages = self.handle.options(stream=True).answer.remote(request, body)
        gone = asyncio.ensure_future(whole(receive))
        gone.add_done_callback(lambda task: task.cancelled() or messages.cancel())
        begun = False
        try:
            async for message in messages:
                begun = True
                await send(message)
        except Exception as error:  # cancelled, or its replica ended
            if gone.done():
                return
            log.error("a replica did not answer", exc_info=error)
            if begun:
                raise
            told = refusal(
                503, "the server failed at this request; try again", "unavailable", Retry_After="5"
            )
            await told(scope, receive, send)
        finally:
            gone.cancel()


async def whole(receive: Receive) -> bytes | None:
    """The body of a request; None: its client went away."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    return None


def look(plan: Plan, threads: int, replicas: int) -> Opened:
    """Read the model once, on a worker, so that what is wrong is one sentence. Raises InputError."""
    torch.set_num_threads(threads)
    pipe = plan.read()
    return Opened(pipe.name, pipe.dtype, None if pipe.effect is None else str(pipe.effect), replicas)


def run(
    address: str,
    replicas: int | None,
    plan: Plan,
    bound: socket.socket,
    drain: float,
    ready: Callable[[str, Opened], None],
    proxies: tuple[str, ...] = (),
) -> bool:
    """Deploy the replicas and serve at a socket until a signal; `ready` gets the URL once requests are answered.

    As `server.run`, whatever the cluster: this machine alone listens. Raises InputError.
    """
    with cluster(address, replicas) as ray:
        count, part = share(ray, replicas, plan.options.device)
        threads = max(1, torch.get_num_threads() // count) if address == LOCAL else part.cpus
        opened = tried(ray, plan, part, threads, count)
        behind = Replicas(deploy(ray, address, plan, part, threads, count))
        door: ASGIApp = behind
        for kind, options in guards(plan.terms, FILES if plan.page else ()):
            door = kind(door, **options)
        try:
            return serve_until_signal(door, behind, bound, drain, lambda: ready(url(bound), opened), proxies)
        finally:
            from ray import serve

            serve.shutdown()


def tried(ray: Any, plan: Plan, part: Share, threads: int, count: int) -> Opened:
    """What the replicas will draw with. Raises InputError."""
    task = ray.remote(max_retries=0, max_calls=1, **part.options)(look)
    try:
        found: Opened = ray.get(task.remote(plan, threads, count))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    return found


def deploy(ray: Any, address: str, plan: Plan, part: Share, threads: int, count: int) -> Any:
    """The handle of all replicas, once they answer. Raises InputError where Ray Serve runs there already."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    there = serve.status()
    if there.proxies or there.applications:
        raise InputError(
            f"Ray Serve runs already on the cluster of --ray {address}; end it with `serve shutdown`, or use another"
        )
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=quiet)
    made = serve.deployment(
        name=NAME,
        num_replicas=count,
        ray_actor_options=part.options,
        max_ongoing_requests=MOST,
        graceful_shutdown_timeout_s=LAST_WORDS,
        graceful_shutdown_wait_loop_s=0.2,
    )(Replica)
    return serve.run(made.bind(plan, threads), name=NAME, route_prefix=None, logging_config=quiet)
