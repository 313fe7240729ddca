"""The counters of one application, for Prometheus."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from .snapshot import Snapshot

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # where workers combine their metrics; set by `kb serve --workers`


class Metrics:
    """The metrics of one application, in a separate registry, so that applications in one process do not add up."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("kb_requests", "Requests answered.", ("route", "method", "status"), registry=registry)
        seconds = "From the head of a request to its answer."
        self._seconds = Histogram("kb_request_seconds", seconds, ("route",), buckets=BUCKETS_S, registry=registry)
        questions = "Questions, by whether the answer was good."
        self._searches = Counter("kb_searches", questions, ("answer",), registry=registry)
        self._entries = _gauge("kb_content_entries", "Entries served.", registry)
        self._generation = _gauge("kb_content_generation", "Number of the content served.", registry)
        self._database_up = _gauge("kb_database_up", "1 when the database answers.", registry)
        self._reports = _gauge("kb_reports", "Reports in the database.", registry)
        self._labelled: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def count_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a template such as /v1/entries/{id}: client input must not become a label."""
        requests, durations = self._labelled.get((route, method, status)) or self._label(route, method, status)
        requests.inc()
        durations.observe(seconds)

    def count_search(self, *, answered: bool) -> None:
        self._searches.labels("good" if answered else "none").inc()

    def set_content(self, generation: int, entries: int) -> None:
        """Record that new content is served."""
        self._generation.set(generation)
        self._entries.set(entries)

    def set_database(self, snapshot: Snapshot) -> None:
        """Record whether the database could be read."""
        self._database_up.set(bool(snapshot.is_up))
        self._reports.set(snapshot.reports)

    def text(self) -> bytes:
        """The metrics in the format of Prometheus, of all workers if there are several."""
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _label(self, route: str, method: str, status: int) -> tuple[Counter, Histogram]:
        """The counters with these labels. Cached, because looking up labels takes longer than counting."""
        pair = self._requests.labels(route, method, status), self._seconds.labels(route)
        self._labelled[route, method, status] = pair
        return pair


def _gauge(name: str, meaning: str, registry: CollectorRegistry) -> Gauge:
    """A gauge; with several workers, it has the value that any of them set last."""
    return Gauge(name, meaning, registry=registry, multiprocess_mode="mostrecent")
