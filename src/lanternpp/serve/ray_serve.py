"""Replicas of the server with Ray Serve: each has its own model and batcher, and this process passes requests to them.

One replica handles a request from beginning to end; the two sides of a race on the page may go to two replicas. This
process listens itself, because Ray's own HTTP proxy has no limits and answers some paths without a key.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
from prometheus_client import Metric
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lanternpp.api.options import place_of
from lanternpp.api.pipeline import Pipeline
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import Share, cluster, share
from lanternpp.serve.app import ServerSpec, disconnected
from lanternpp.serve.error_responses import error_response, response_for
from lanternpp.serve.guard import Guard
from lanternpp.serve.metrics import CONTENT_TYPE, REQUESTS, Metrics
from lanternpp.serve.server import GRACEFUL_SECONDS
from lanternpp.serve.server import run as serve_until_signal
from lanternpp.serve.tickets import CLOSED, Closed

NAME = "lanternpp"
MAX_REQUESTS = 10_000  # of a replica at once; so high that only its batcher's queue limits them
SCRAPE = 3.0  # seconds that a replica has for its metrics; Prometheus waits for 10
GRACE = 10.0  # seconds that a call to all replicas may take beyond their own timeout

log = logging.getLogger("lanternpp.serve")


def drawn_by(pipe: Pipeline) -> tuple[str, str | None]:
    """A model and where it draws, and the effect of its weights in 8 bits, as users read them."""
    place = place_of({"device": str(pipe.device), "dtype": pipe.dtype})
    return f"{pipe.name} on {place}", str(pipe.model.effect) if pipe.model.effect else None


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

    def metrics(self) -> list[Metric]:
        """Its metrics with a label `replica`, except those of requests, which are counted where they arrive."""
        from ray import serve

        label = {"replica": serve.get_replica_context().replica_id.unique_id}
        found = [family for family in self.app.state.metrics.registry.collect() if family.name != REQUESTS]
        for family in found:
            family.samples = [sample._replace(labels=sample.labels | label) for sample in family.samples]
        return found

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
        self.handle, self.closed, self.metrics = handle, False, Metrics()

    def close(self, drain: bool, timeout: float) -> bool:
        """As `Batcher.close`; without `drain`, the replicas end with Ray Serve. A replica that ends meanwhile has not finished."""
        self.closed = True
        if not drain:
            return True
        outcomes = self._ask_all("drain", timeout, timeout_s=timeout + GRACE)
        return bool(outcomes) and all(outcome is True for outcome in outcomes)

    def _ask_all(self, method: str, *args: Any, timeout_s: float = GRACE) -> list[Any]:
        """What each replica returns or raises; empty where none is up."""
        try:
            asked = self.handle.broadcast(method, *args)
            return list(asked.results(timeout_s=timeout_s, return_exceptions=True))
        except Exception as error:
            log.warning("no replica is up for %s", method, exc_info=error)
            return []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to a replica, and its answer back. Once closed, answer it here: a replica that replaces another knows no signal."""
        if (scope["path"], scope["method"]) == ("/metrics", "GET"):
            found = await asyncio.to_thread(self._ask_all, "metrics", timeout_s=SCRAPE)
            families = [family for each in found if isinstance(each, list) for family in each]
            await Response(self.metrics.text(families), media_type=CONTENT_TYPE)(scope, receive, send)
            return
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
        messages = self.handle.options(stream=True).answer.remote(scope, body)
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
            from ray.exceptions import RayActorError

            log.error("a replica did not answer", exc_info=not isinstance(error, RayActorError))
            message = "the server failed at this request; try again"
            failed = error_response(503, message, "unavailable", Retry_After="5")
            if begun:  # a stream: other answers are sent in one piece
                event = b"event: error\ndata: %b\n\n" % bytes(failed.body)
                await send({"type": "http.response.body", "body": event})
            else:
                await failed(scope, receive, send)
        finally:
            gone.cancel()


def run(
    address: str,
    replicas: int | None,
    spec: ServerSpec,
    bound: socket.socket,
    drain: float,
    ready: Callable[[int, str, str | None], None],
    proxies: tuple[str, ...] = (),
) -> bool:
    """Deploy the replicas and serve at a socket until a signal; `ready` is called once requests are answered, with
    the number of replicas and what `drawn_by` says.

    Otherwise as `server.run`. Only this machine listens, wherever the replicas run. Raises InputError.
    """
    with cluster(address, replicas) as ray:
        part = share(ray, address, replicas, spec.options.device)
        drawn = check_on_worker(ray, spec, part)
        backend = Replicas(deploy(ray, address, spec, part))
        app = Guard(backend, spec.config, backend.metrics.answered)
        try:
            return serve_until_signal(
                app, backend, bound, drain, lambda: ready(part.workers, *drawn), proxies
            )
        finally:
            from ray import serve

            serve.shutdown()


def check_on_worker(ray: Any, spec: ServerSpec, part: Share) -> tuple[str, str | None]:
    """`drawn_by` of the model, read on a worker once before all replicas do, so that a mistake is one InputError."""

    def check() -> tuple[str, str | None]:
        torch.set_num_threads(part.threads)
        return drawn_by(spec.load_model())

    try:
        once = ray.remote(max_retries=0, max_calls=1, **part.options)(check)
        found: tuple[str, str | None] = ray.get(once.remote())
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
