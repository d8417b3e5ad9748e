"""Replicas of the server with Ray Serve: each has its own model and batcher, and this process passes requests to them.

One replica handles a request from beginning to end; the two sides of a race on the page may go to two replicas. This
process listens itself, because Ray's own HTTP proxy has no limits on connections and answers some paths without a key.
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

from lanternpp.api.options import device_text
from lanternpp.api.pipeline import Pipeline
from lanternpp.errors import InputError
from lanternpp.jobs.cluster import Share, cluster, share
from lanternpp.serve.app import ServerSpec, disconnected
from lanternpp.serve.error_responses import error_response, response_for
from lanternpp.serve.guard import Guard
from lanternpp.serve.metrics import CONTENT_TYPE, REQUESTS, Metrics
from lanternpp.serve.server import GRACEFUL_SECONDS
from lanternpp.serve.server import run as serve_until_signal
from lanternpp.serve.tickets import closed

NAME = "lanternpp"
MAX_REQUESTS = 10_000  # of a replica at once; so high that only the queue of its batcher limits them
METRICS_SECONDS = 3.0  # time in which replicas may report their metrics; Prometheus waits for 10
GRACE_SECONDS = 10.0  # time that a call to all replicas may take beyond the replicas' own timeout

log = logging.getLogger("lanternpp.serve")


def describe_model(pipe: Pipeline) -> tuple[str, str | None]:
    """Return texts for the user: the model with its device and dtype; the effect of 8-bit weights, or None without them."""
    device_and_dtype = device_text({"device": str(pipe.device), "dtype": pipe.dtype})
    return f"{pipe.name} on {device_and_dtype}", str(pipe.model.effect) if pipe.model.effect else None


class Replica:
    """A server without a socket: `Replicas` passes requests to it."""

    def __init__(self, spec: ServerSpec, threads: int):
        torch.set_num_threads(threads)
        self.batcher, self.app = spec.start()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the app's response. A caller that stops reading them counts as disconnected."""
        caller_left = asyncio.Event()
        messages = asyncio.Queue[Message | None]()  # None: the response has ended
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await caller_left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            task.result()
        finally:
            caller_left.set()

    def check_health(self) -> None:
        """Raise the error of a broken batcher. Ray Serve calls this method, and replaces a replica that raises."""
        if self.batcher.broken is not None:
            raise self.batcher.broken

    def metrics(self) -> list[Metric]:
        """Return the metrics with a label `replica`, except those of requests, which the listening process counts."""
        from ray import serve

        label = {"replica": serve.get_replica_context().replica_id.unique_id}
        families = [family for family in self.batcher.metrics.registry.collect() if family.name != REQUESTS]
        for family in families:
            family.samples = [sample._replace(labels=sample.labels | label) for sample in family.samples]
        return families

    async def drain(self, seconds: float) -> bool:
        """Accept no new pictures and finish the accepted ones. Returns whether all were finished within these seconds."""
        return await asyncio.to_thread(self.batcher.close, True, seconds)

    def __del__(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.close(False, 0)


class Replicas:
    """All replicas, by their handle: an ASGI app with `close` and `broken` of a `Batcher`."""

    broken: Exception | None = None  # never: Ray Serve replaces a replica that breaks

    def __init__(self, handle: Any):
        self.handle, self.closed, self.metrics = handle, False, Metrics()

    def close(self, drain: bool, timeout: float) -> bool:
        """As `Batcher.close`; without `drain`, the replicas end with Ray Serve. A replica that dies has not finished."""
        self.closed = True
        if not drain:
            return True
        outcomes = self._call_all("drain", timeout, timeout_s=timeout + GRACE_SECONDS)
        return bool(outcomes) and all(outcome is True for outcome in outcomes)

    def _call_all(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every replica; return the result or error of each, or an empty list where no replica is up."""
        try:
            responses = self.handle.broadcast(method, *args)
            return list(responses.results(timeout_s=timeout_s, return_exceptions=True))
        except Exception as error:
            log.warning("no replica is up for %s", method, exc_info=error)
            return []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to a replica, and its response back to the client."""
        if (scope["path"], scope["method"]) == ("/metrics", "GET"):
            outcomes = await asyncio.to_thread(self._call_all, "metrics", timeout_s=METRICS_SECONDS)
            families = [family for outcome in outcomes if isinstance(outcome, list) for family in outcome]
            await Response(self.metrics.text(families), media_type=CONTENT_TYPE)(scope, receive, send)
            return
        # A replica that has replaced a dead one does not know of the shutdown, so requests are rejected here.
        if self.closed:
            await response_for(closed())(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await request.body()
        except (ClientDisconnect, HTTPException) as error:
            await response_for(error)(scope, receive, send)
            return
        messages = self.handle.options(stream=True).answer.remote(scope, body)
        disconnect = asyncio.ensure_future(disconnected(request))
        disconnect.add_done_callback(lambda task: None if task.cancelled() else messages.cancel())
        has_started = False
        try:
            async for message in messages:
                has_started = True
                await send(message)
        except Exception as error:  # the request was cancelled, or its replica died
            if disconnect.done():
                return
            from ray.exceptions import RayActorError

            log.error("a replica did not answer", exc_info=not isinstance(error, RayActorError))
            reason = "the server failed at this request; try again"
            response = error_response(503, reason, "unavailable", Retry_After="5")
            if has_started:  # The response is a stream: any other response is sent in one piece.
                event = b"event: error\ndata: %b\n\n" % bytes(response.body)
                await send({"type": "http.response.body", "body": event})
            else:
                await response(scope, receive, send)
        finally:
            disconnect.cancel()


def run(
    address: str,
    replicas: int | None,
    spec: ServerSpec,
    bound: socket.socket,
    drain: float,
    ready: Callable[[int, str, str | None], None],
    proxies: tuple[str, ...] = (),
) -> bool:
    """Deploy the replicas and serve at a socket until a signal, as `server.run`. Raises InputError.

    `ready` is called once requests are answered, with the number of replicas and the texts of `describe_model`. Only this machine
    listens, wherever the replicas run.
    """
    with cluster(address, replicas) as ray:
        resources = share(ray, address, replicas, spec.options.device)
        texts = check_on_worker(ray, spec, resources)
        backend = Replicas(deploy(ray, address, spec, resources))
        app = Guard(backend, spec.config, backend.metrics.answered)
        try:
            return serve_until_signal(
                app, backend, bound, drain, lambda: ready(resources.workers, *texts), proxies
            )
        finally:
            from ray import serve

            serve.shutdown()


def check_on_worker(ray: Any, spec: ServerSpec, resources: Share) -> tuple[str, str | None]:
    """Read the model on one worker, so that a mistake is one InputError and not one of each replica; return `describe_model` of it."""

    def check() -> tuple[str, str | None]:
        torch.set_num_threads(resources.threads)
        return describe_model(spec.load_model())

    try:
        task = ray.remote(max_retries=0, max_calls=1, **resources.options)(check)
        texts: tuple[str, str | None] = ray.get(task.remote())
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, InputError) else error from None
    return texts


def deploy(ray: Any, address: str, spec: ServerSpec, resources: Share) -> Any:
    """Deploy all replicas; return their handle once they answer. Raises InputError where Ray Serve already runs on the cluster."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    status = serve.status()
    if status.proxies or status.applications:
        raise InputError(
            f"Ray Serve already runs on the cluster of --ray {address}; end it with `serve shutdown`, or use another cluster"
        )
    logging_config = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(proxy_location="Disabled", logging_config=logging_config)
    deployment = serve.deployment(
        name=NAME,
        num_replicas=resources.workers,
        ray_actor_options=resources.options,
        max_ongoing_requests=MAX_REQUESTS,
        graceful_shutdown_timeout_s=GRACEFUL_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
    )(Replica)
    app = deployment.bind(spec, resources.threads)
    return serve.run(app, name=NAME, route_prefix=None, logging_config=logging_config)
