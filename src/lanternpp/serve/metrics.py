"""Metrics for Prometheus, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client as prometheus
from prometheus_client import Metric

from lanternpp.errors import InputError
from lanternpp.serve.config import EDITS, ServerConfig
from lanternpp.serve.tickets import CANCELLED, EXPIRED, Ticket

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUESTS = "lanternpp_requests"
SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
ROUTES = ("/v1/images/generations", EDITS, "/v1/models", "/healthz", "/metrics", "/openapi.json")


class Metrics:
    """Counts the requests that an app answers and, with a batcher's configuration, the pictures that it draws."""

    def __init__(
        self,
        config: ServerConfig | None = None,
        queued: Callable[[], int] = lambda: 0,
        running: Callable[[], int] = lambda: 0,
        runners: Callable[[int], int] = lambda size: 0,
    ):
        """queued, running, runners: return the present number of pictures in the queue, of pictures in slots, and of batch runners of a size."""
        prometheus.disable_created_metrics()
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        self.requests = counter(REQUESTS, "HTTP requests answered", ["route", "status"])
        if config is None:
            return
        self.pictures = counter("lanternpp_pictures", "Pictures by how they ended", ["outcome", "method"])
        self.seconds = histogram(
            "lanternpp_picture_seconds", "Seconds from request to picture", buckets=SECONDS_BUCKETS
        )
        self.waited = histogram("lanternpp_waiting_seconds", "Seconds in the queue", buckets=SECONDS_BUCKETS)
        sizes = [1 << exponent for exponent in range(config.slots.bit_length())]
        self.batch = histogram("lanternpp_batch_size", "Pictures that a step advances", buckets=sizes)
        bounds = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15)
        self.codes_per_pass = histogram(
            "lanternpp_codes_per_pass", "Codes per pass of a picture", ["method"], buckets=bounds
        )
        gauge = partial(prometheus.Gauge, registry=self.registry)
        gauge("lanternpp_queue_length", "Pictures in the queue").set_function(queued)
        gauge("lanternpp_queue_limit", "Most pictures that the queue takes").set(config.queue)
        gauge("lanternpp_running", "Pictures in slots").set_function(running)
        engines = gauge("lanternpp_engines", "Engines kept, by batch size", ["batch_size"])
        for size in sizes:
            engines.labels(str(size)).set_function(partial(runners, size))

    def answered(self, path: str, status: int) -> None:
        """Count a response with this status to a request for this path."""
        route = next((route for route in ROUTES if path == route or path.startswith(f"{route}/")), "page")
        self.requests.labels(route, str(status)).inc()

    def ended(self, ticket: Ticket) -> None:
        """Count a settled ticket by its outcome and, where its picture is finished, observe the figures of the picture."""
        method, error = ticket.settings.method, ticket.exception()
        if error is None:
            image = ticket.result()
            self.seconds.observe(time.monotonic() - ticket.arrived)
            self.waited.observe(image.waited)
            self.codes_per_pass.labels(method).observe(len(image.codes) / len(image.accepted))
        elif isinstance(error, InputError) and ticket.started is None:
            return  # the prompt was rejected
        outcomes = {CANCELLED: "cancelled", EXPIRED: "expired"}
        outcome = outcomes.get(getattr(error, "status_code", 0), "failed") if error else "drawn"
        self.pictures.labels(outcome, method).inc()

    def text(self, replica_families: Iterable[Metric] = ()) -> bytes:
        """Return all metrics, and those of replicas, in Prometheus' text format."""
        merged: dict[str, Metric] = {}
        for family in (*self.registry.collect(), *replica_families):
            merged_family = merged.setdefault(family.name, family)
            if merged_family is not family:
                merged_family.samples += family.samples
        return prometheus.generate_latest(cast(Any, SimpleNamespace(collect=merged.values)))
