"""Metrics for Prometheus, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client as prometheus
from prometheus_client import Metric

from lanternpp.serve.batcher import Batcher
from lanternpp.serve.config import EDITS
from lanternpp.serve.tickets import Cancelled, Expired, Ticket

CONTENT = "text/plain; version=0.0.4; charset=utf-8"
REQUESTS = "lanternpp_requests"
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
ROUTES = ("/v1/images/generations", EDITS, "/v1/models", "/healthz", "/metrics", "/openapi.json")


class Metrics:
    """Counts the requests that an app answers and, with a batcher, the pictures that it draws."""

    def __init__(self, batcher: Batcher | None = None):
        prometheus.disable_created_metrics()
        self.registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self.registry)
        histogram = partial(prometheus.Histogram, registry=self.registry)
        self.requests = counter(REQUESTS, "HTTP requests answered", ["route", "status"])
        if batcher is None:
            return
        self.pictures = counter("lanternpp_pictures", "Pictures by how they ended", ["outcome", "method"])
        self.seconds = histogram(
            "lanternpp_picture_seconds", "Seconds from request to picture", buckets=SECONDS
        )
        self.waited = histogram("lanternpp_waiting_seconds", "Seconds in the queue", buckets=SECONDS)
        rows = [1 << i for i in range(batcher.config.slots.bit_length())]
        self.batch = histogram("lanternpp_batch_size", "Pictures that a step advances", buckets=rows)
        codes = (1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15)
        self.speed = histogram(
            "lanternpp_codes_per_pass", "Codes per pass of a picture", ["method"], buckets=codes
        )
        gauge = partial(prometheus.Gauge, registry=self.registry)
        gauge("lanternpp_queue_length", "Pictures in the queue").set_function(lambda: batcher.load.queued)
        gauge("lanternpp_queue_limit", "Most pictures that the queue takes").set(batcher.config.queue)
        gauge("lanternpp_running", "Pictures in slots").set_function(lambda: batcher.load.running)
        engines = gauge("lanternpp_engines", "Engines kept, by batch size", ["batch_size"])
        for size in rows:
            engines.labels(str(size)).set_function(partial(lambda size: batcher.load.runners[size], size))
        batcher.stepped, batcher.ended = self.batch.observe, self.ended

    def answered(self, path: str, status: int) -> None:
        """A request for a path got an answer with this status."""
        route = next((known for known in ROUTES if path == known or path.startswith(f"{known}/")), "page")
        self.requests.labels(route, str(status)).inc()

    def ended(self, ticket: Ticket) -> None:
        """A ticket is settled."""
        method, error = ticket.spec.settings.method, ticket.exception()
        if error is None:
            image = ticket.result()
            self.seconds.observe(time.monotonic() - ticket.spec.arrived)
            self.waited.observe(image.waited)
            self.speed.labels(method).observe(len(image.codes) / len(image.accepted))
        outcomes = {type(None): "drawn", Cancelled: "cancelled", Expired: "expired"}
        self.pictures.labels(outcomes.get(type(error), "failed"), method).inc()

    def text(self, others: Iterable[Metric] = ()) -> bytes:
        """All metrics, and those of others, in Prometheus' text format."""
        found: dict[str, Metric] = {}
        for family in (*self.registry.collect(), *others):
            if (same := found.setdefault(family.name, family)) is not family:
                same.samples += family.samples
        return prometheus.generate_latest(cast(Any, SimpleNamespace(collect=found.values)))
