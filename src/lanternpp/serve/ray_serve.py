"""Replicas of the server with Ray Serve: each has its own model and batcher, and this process passes requests to them.

One replica handles a request from beginning to end; the two sides of a race on the page may go to two replicas. This
process listens itself, because Ray's own HTTP proxy has no limits and answers some paths without a key.
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
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from lanternpp.api.pipeline import Pipeline
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import Share, cluster, share
from lanternpp.serve.app import ServerSpec, disconnected
from lanternpp.serve.error_responses import error_response, response_for
from lanternpp.serve.guard import Guard
from lanternpp.serve.server import GRACEFUL_SECONDS
from lanternpp.serve.server import run as serve_until_signal
from lanternpp.serve.tickets import CLOSED, Closed

NAME = "lanternpp"
MAX_REQUESTS = 10_000  # of a replica at once; so high that only its batcher's queue limits them
GRACE = 10.0  # seconds that a call to all replicas may take beyond its own timeout
SCOPE_KEYS = (  # the entries of the ASGI scope that are sent to the replica
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server", "state"),
)

log = logging.getLogger("lanternpp.serve")


@dataclass(frozen=True)
class ReplicaInfo:
    """What the replicas draw with."""

    model: str
    device: str
    dtype: str
    effect: str | None  # of weights in 8 bits; None: they have not
    replicas: int

    @classmethod
    def of(cls, pipe: Pipeline, replicas: int) -> ReplicaInfo:
        """Of replicas of this model."""
        effect = str(pipe.model.effect) if pipe.model.effect else None
        return cls(pipe.name, str(pipe.device), pipe.dtype, effect, replicas)


class Replica:
    """A server without a socket: `Replicas` passes requests to it."""

    def __init__(self, spec: ServerSpec, threads: int):
        torch.set_num_threads(threads)
        self.batcher, self.app = spec.start()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of the answer. A caller that stops reading them counts as disconnected."""
        gone, messages = asyncio.Event(), asyncio.Queue[Message | None]()
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.ensure_future(self.app(scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            answering.result()
        finally:
            gone.set()

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises here."""
        if self.batcher.broken is not None:
            raise self.batcher.broken

    async def drain(self, seconds: float) -> bool:
        """Accept nothing new and finish the accepted pictures. Returns whether that was done in time."""
        return await asyncio.to_thread(self.batcher.close, True, seconds)

    def __del__(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.close(False, 0)


class Replicas:
    """All replicas, by their handle: an ASGI app, closed as a `Batcher` is."""

    broken: Exception | None = None  # never: Ray Serve replaces a replica that breaks

    def __init__(self, handle: Any):
        self.handle, self.closed = handle, False

    def close(self, drain: bool, timeout: float) -> bool:
        """As `Batcher.close`; without `drain`, the replicas end with Ray Serve. A replica that ends meanwhile has not finished."""
        self.closed = True
        if not drain:
            return True
        try:
            drained = self.handle.broadcast("drain", timeout)
            outcomes = drained.results(timeout_s=timeout + GRACE, return_exceptions=True)
        except Exception as error:
            log.warning("no replica is up to finish its pictures", exc_info=error)
            return False
        return all(outcome is True for outcome in outcomes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to a replica, and its answer back. Once closed, answer it here: a replica that replaces another knows no signal."""
        if self.closed:
            await response_for(Closed(CLOSED))(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            return
        except HTTPException as error:
            await response_for(error)(scope, receive, send)
            return
        sent = {name: scope[name] for name in SCOPE_KEYS if name in scope}
        messages = self.handle.options(stream=True).answer.remote(sent, body)
        gone = asyncio.ensure_future(disconnected(request))
        gone.add_done_callback(lambda task: task.cancelled() or messages.cancel())
        begun = False
        try:
            async for message in messages:
                begun = True
                await send(message)
        except Exception as error:  # the request was cancelled, or its replica ended
            if gone.done():
                return
            log.error("a replica did not answer", exc_info=error)
            if begun:
                raise
            message = "the server failed at this request; try again"
            await error_response(503, message, "unavailable", Retry_After="5")(scope, receive, send)
        finally:
            gone.cancel()


def run(
    address: str,
    replicas: int | None,
    spec: ServerSpec,
    bound: socket.socket,
    drain: float,
    ready: Callable[[ReplicaInfo], None],
    proxies: tuple[str, ...] = (),
) -> bool:
    """Deploy the replicas and serve at a socket until a signal; `ready` is called once requests are answered.

    Otherwise as `server.run`. Only this machine listens, wherever the replicas run. Raises InputError.
    """
    with cluster(address, replicas) as ray:
        part = share(ray, address, replicas, spec.options.device)
        info = check_on_worker(ray, spec, part)
        backend = Replicas(deploy(ray, address, spec, part))
        app = Guard(backend, spec.config)
        try:
            return serve_until_signal(app, backend, bound, drain, lambda: ready(info), proxies)
        finally:
            from ray import serve

            serve.shutdown()


def check_on_worker(ray: Any, spec: ServerSpec, part: Share) -> ReplicaInfo:
    """Read the model on a worker, once before all replicas do, so that a mistake is one InputError."""

    def check() -> ReplicaInfo:
        torch.set_num_threads(part.threads)
        return ReplicaInfo.of(spec.load_model(), part.workers)

    try:
        found: ReplicaInfo = ray.get(ray.remote(max_retries=0, max_calls=1, **part.options)(check).remote())
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    return found


def deploy(ray: Any, address: str, spec: ServerSpec, part: Share) -> Any:
    """The handle of all replicas, once they answer. Raises InputError where Ray Serve already runs on the cluster."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    status = serve.status()
    if status.proxies or status.applications:
        raise InputError(
            f"Ray Serve already runs on the cluster of --ray {address}; end it with `serve shutdown`, or use another cluster"
        )
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=quiet)
    made = serve.deployment(
        name=NAME,
        num_replicas=part.workers,
        ray_actor_options=part.options,
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=GRACEFUL_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
    )(Replica)
    return serve.run(made.bind(spec, part.threads), name=NAME, route_prefix=None, logging_config=quiet)
