"""GET /metrics: counts and durations for Prometheus."""

from __future__ import annotations

import os

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from ..state.snapshot import Snapshot

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARED = "PROMETHEUS_MULTIPROC_DIR"  # the folder in which workers of one service add up, set by `kb serve --workers`

router = APIRouter(tags=["health"])


class Metrics:
    """What one application counts. A registry of its own, so that two in one process do not add up."""

    def __init__(self) -> None:
        self._registry = one = CollectorRegistry()
        self._requests = Counter("kb_requests", "Requests answered.", ("route", "method", "status"), registry=one)
        took = "From the head of a request to its answer."
        self._seconds = Histogram("kb_request_seconds", took, ("route",), buckets=BUCKETS_S, registry=one)
        self.searches = Counter("kb_searches", "Questions, by whether the answer was good.", ("answer",), registry=one)
        self._entries = _gauge("kb_content_entries", "Entries served.", one)
        self._generation = _gauge("kb_content_generation", "Number of the content served.", one)
        self._database_up = _gauge("kb_database_up", "1 when the database answers.", one)
        self._reports = _gauge("kb_reports", "Reports in the database.", one)
        self._kinds: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count one answer. `route` is a template such as /v1/entries/{id}: names of clients are no labels."""
        kind = self._kinds.get((route, method, status)) or self._kind(route, method, status)
        kind[0].inc()
        kind[1].observe(seconds)

    def serve(self, generation: int, entries: int) -> None:
        """Content is in its place."""
        self._generation.set(generation)
        self._entries.set(entries)

    def see(self, snapshot: Snapshot) -> None:
        """The database was looked at."""
        self._database_up.set(bool(snapshot.is_up))
        self._reports.set(snapshot.reports)

    def _kind(self, route: str, method: str, status: int) -> tuple[Counter, Histogram]:
        """Looking up labels takes longer than counting."""
        found = self._requests.labels(route, method, status), self._seconds.labels(route)
        self._kinds[route, method, status] = found
        return found

    def text(self) -> bytes:
        """In the format of Prometheus; of all workers together where there are several."""
        if SHARED not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)


def _gauge(name: str, meaning: str, registry: CollectorRegistry) -> Gauge:
    """With several workers, what any of them has set last."""
    return Gauge(name, meaning, registry=registry, multiprocess_mode="mostrecent")


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Counts and durations for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": "kb_database_up 1.0\n"}}}},
)
async def metrics(request: Request) -> Response:
    """Since the process started; with several workers, of all of them."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
