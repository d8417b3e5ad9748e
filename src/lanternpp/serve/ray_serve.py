"""Replicas of the server over Ray Serve: each its own model and batcher, the same app before all of them.

A request is one replica's from beginning to end; the two sides of a race on the page may be of two.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from lanternpp.cluster import LOCAL, Share, cluster, default_workers, share
from lanternpp.errors import InputError
from lanternpp.pipeline import Pipeline
from lanternpp.serve.app import create_app
from lanternpp.serve.aside import aside
from lanternpp.serve.batcher import Batcher, Choose
from lanternpp.serve.server import LAST_WORDS
from lanternpp.serve.terms import Terms
from lanternpp.targets.base import PromptWarning

Measure = Callable[[Pipeline, Terms, int], Choose]
NAME = "lanternpp"
MOST = 10_000  # requests that a replica is handed at once: its batcher says when it is full
GRACE = 10.0  # seconds that a call to all replicas may take besides what it waits for


@dataclass(frozen=True)
class Plan:
    """A model as `Pipeline.from_pretrained` reads it, the terms of a server, and what its batcher is made with."""

    model: str
    drafter: str | None
    device: str
    dtype: str
    size: str | None
    terms: Terms
    slots: int = 8
    queue: int = 64
    lanes: int = 4
    choose: Choose | None = None
    page: bool = True

    def read(self) -> Pipeline:
        """The model; what is missing of the method is missed here. Raises InputError."""
        pipe = Pipeline.from_pretrained(self.model, self.drafter, self.device, self.dtype, self.size)
        pipe.new_engine(self.terms.settings(pipe, None, {}))
        return pipe


@dataclass(frozen=True)
class Opened:
    """What a replica draws with."""

    model: str
    dtype: str
    effect: str | None
    choose: Choose | None
    replicas: int


class Replica:
    """A server without a socket: Ray Serve hands it the requests."""

    def __init__(self, plan: Plan, threads: int):
        torch.set_num_threads(threads)
        pipe = aside(plan.read)
        warnings.simplefilter("ignore", PromptWarning)  # of strangers' prompts
        self.plan, self.batcher = plan, Batcher(pipe, plan.slots, plan.queue, plan.lanes, plan.choose)

    def __serve_build_asgi_app__(self) -> Any:
        return create_app(self.batcher, self.plan.terms, self.plan.page)

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


def look(plan: Plan, measure: Measure | None, threads: int, replicas: int) -> Opened:
    """Read the model once, on a worker, so that what is wrong is one sentence; all replicas draw with what is measured.

    Raises InputError.
    """
    torch.set_num_threads(threads)
    pipe = plan.read()
    effect = None if pipe.effect is None else str(pipe.effect)
    choose = measure(pipe, plan.terms, plan.slots) if measure else None
    return Opened(pipe.name, pipe.dtype, effect, choose, replicas)


def run(
    address: str,
    replicas: int | None,
    plan: Plan,
    measure: Measure | None,
    host: str,
    port: int,
    drain: float,
    ready: Callable[[str, Opened], None],
) -> bool:
    """Deploy the replicas and serve until SIGTERM or SIGINT; `ready` gets the URL once requests are answered.

    measure: finds what to draw with at which size. On a cluster every machine listens at this host and port.

    From the signal on, accepted orders have `drain` seconds to finish and new ones get 503. A second signal ends it
    at once. Returns whether all that was accepted was finished. Raises InputError.
    """
    with cluster(address, replicas) as ray:
        count = replicas or default_workers(ray, plan.device)
        part = share(ray, count, plan.device)
        threads = max(1, torch.get_num_threads() // count) if address == LOCAL else part.cpus
        opened = tried(ray, plan, measure, part, threads, count)
        plan = replace(plan, choose=opened.choose)
        handle = deploy(ray, address, plan, part, threads, count, host, port)
        try:
            return wait(handle, drain, lambda: ready(url(host, port), opened))
        finally:
            from ray import serve

            serve.shutdown()


def tried(ray: Any, plan: Plan, measure: Measure | None, part: Share, threads: int, count: int) -> Opened:
    """What the replicas will draw with. Raises InputError."""
    task = ray.remote(max_retries=0, max_calls=1, **part.options)(look)
    try:
        found: Opened = ray.get(task.remote(plan, measure, threads, count))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, InputError):
            raise error.cause from None
        raise
    return found


def deploy(
    ray: Any, address: str, plan: Plan, part: Share, threads: int, count: int, host: str, port: int
) -> Any:
    """The handle of all replicas, once they answer. Raises InputError where Ray Serve runs there already."""
    import logging

    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if serve.status().proxies:
        raise InputError(
            f"Ray Serve runs already on the cluster of --ray {address}; end it with `serve shutdown`, or use another"
        )
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(
        proxy_location="HeadOnly" if address == LOCAL else "EveryNode",
        http_options={"host": host, "port": port},
        logging_config=quiet,
    )
    made = serve.deployment(
        name=NAME,
        num_replicas=count,
        ray_actor_options=part.options,
        max_ongoing_requests=MOST,
        graceful_shutdown_timeout_s=LAST_WORDS,
        graceful_shutdown_wait_loop_s=0.2,
    )(serve.ingress()(Replica))
    return serve.run(made.bind(plan, threads), name=NAME, logging_config=quiet)


def wait(handle: Any, drain: float, ready: Callable[[], None]) -> bool:
    """Until a signal, and then for the replicas to finish; as `run`."""
    asked, again = threading.Event(), threading.Event()

    def heard(sig: int, frame: FrameType | None) -> None:
        (again if asked.is_set() else asked).set()

    before = {sig: signal.signal(sig, heard) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready()
        asked.wait()
        drained: list[bool] = []

        def finish() -> None:
            drained.extend(handle.broadcast("drain", drain).results(timeout_s=drain + GRACE))

        finishing = threading.Thread(target=finish, name="lanternpp-drain", daemon=True)
        finishing.start()
        while finishing.is_alive() and not again.is_set():
            finishing.join(0.1)
        return bool(drained) and all(drained)
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def url(host: str, port: int) -> str:
    """How a client on this machine reaches it."""
    named = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{named}]:{port}" if ":" in named else f"http://{named}:{port}"
