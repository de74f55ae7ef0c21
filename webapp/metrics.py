"""/metrics: HTTP figures of all API processes, and the queues' depth as the state server knows it.

The exporter counts requests; under gunicorn its values live in files of PROMETHEUS_MULTIPROC_DIR, which every process
can sum up. Its own endpoint builds a fresh registry for each scrape, in which a collector of ours would be missing, so
the view is ours.

Labels are bounded: routes are the rules of the URL map (anything else is `other`), methods the known ones, models those
of the catalogue. A stream counts when it begins: its duration is the time to the first byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flask import Flask, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_flask_exporter import PrometheusMetrics
from prometheus_flask_exporter.multiprocess import GunicornInternalPrometheusMetrics

from pool.errors import StateUnavailable
from pool.store.depth import depths
from webapp.node import Node

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

#: The library's collector has no types.
_sum_up: Any = MultiProcessCollector

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def route(request: Request) -> str:
    """The URL rule that matched, as a label."""
    return str(request.url_rule) if request.url_rule is not None else "other"


class QueueCollector(Collector):
    """Gauges read from the state server at scrape time."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Depth of each model; without a state server only that it is away."""
        up = GaugeMetricFamily("genpool_state_up", "Whether the state server answered this scrape.")
        queued = GaugeMetricFamily("genpool_jobs_queued", "Jobs waiting for a worker.", labels=["model"])
        running = GaugeMetricFamily("genpool_jobs_running", "Jobs begun by a worker.", labels=["model"])
        try:
            found = depths(self._node.services.client, self._node.services.submitter.models())
        except StateUnavailable:
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        for model, depth in found.items():
            queued.add_metric([model], depth.queued)
            running.add_metric([model], depth.running)
        return [up, queued, running]


class KnownMethods:
    """WSGI middleware: a method that HTTP does not know becomes OTHER, so that callers cannot invent label values."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        if environ["REQUEST_METHOD"].upper() not in METHODS:
            environ["REQUEST_METHOD"] = "OTHER"
        return self._app(environ, start_response)


def register_metrics(app: Flask, node: Node) -> None:
    """Count requests from now on, and serve /metrics."""
    registry = CollectorRegistry()
    shared = MULTIPROCESS_VARIABLE in os.environ
    exporter = GunicornInternalPrometheusMetrics if shared else PrometheusMetrics
    exporter(
        None, path=None, registry=registry, group_by=route, defaults_prefix="genpool", excluded_paths="^/metrics$"
    ).init_app(app)
    queues = QueueCollector(node)
    node.places.on_change = _gauge("genpool_requests_waiting", "Requests and streams that hold a place.", registry).inc
    node.waits.on_change = _gauge("genpool_waiters", "Waits for news of a job.", registry).inc

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(b"".join(_parts(None if shared else registry, queues)), content_type=CONTENT_TYPE_LATEST)

    app.wsgi_app = KnownMethods(app.wsgi_app)  # type: ignore[method-assign]  # Flask's documented way


def _gauge(name: str, text: str, registry: CollectorRegistry) -> Gauge:
    """A gauge that is the sum over the processes that live."""
    return Gauge(name, text, registry=registry, multiprocess_mode="livesum")


def _parts(own: CollectorRegistry | None, queues: QueueCollector) -> Iterator[bytes]:
    """The HTTP figures (of this process alone, or summed up from all), then the queues'."""
    if own is None:
        own = CollectorRegistry()
        _sum_up(own)
    yield generate_latest(own)
    live = CollectorRegistry()
    live.register(queues)
    yield generate_latest(live)
